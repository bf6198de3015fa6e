-- Adds the formats of a few lines of a sender.
-- KEYS senders
-- ARGV name, most formats, most lines, and then: format, lines
-- returns 1, or 0 where the sender is forgotten
-- invariant: the counts are of the last lines that were looked at, between half of `most lines` and all of them.
local SENDERS, name, most, window = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local known = redis.call('HGET', SENDERS, name)
if not known then return 0 end
local sender, total, names = cjson.decode(known), 0, {}
local formats = sender.formats or {}
for i = 4, #ARGV, 2 do
  formats[ARGV[i]] = (formats[ARGV[i]] or 0) + tonumber(ARGV[i + 1])
end
for format, lines in pairs(formats) do
  total = total + lines
  names[#names + 1] = format
end
table.sort(names, function(a, b)
  if formats[a] ~= formats[b] then return formats[a] > formats[b] end
  return a < b
end)
local halved = {}
for place, format in ipairs(names) do
  local lines = total > window and math.floor(formats[format] / 2) or formats[format]
  if place <= most and lines > 0 then halved[format] = lines end
end
sender.formats = halved
redis.call('HSET', SENDERS, name, cjson.encode(sender))
return 1
