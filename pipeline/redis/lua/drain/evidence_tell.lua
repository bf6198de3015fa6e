-- What came of lines that evidence_ask gave out.
-- KEYS young, old
-- ARGV limit of the young half, ttl s, then pairs of field and evidence ('' = none: whoever asks next scores the line)
-- returns 1
-- invariant: as evidence_ask. Whoever told it: the evidence of a line under a version is always the same.
local kept = {}
local function keep()
  if #kept == 0 then return end
  if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[1]) then redis.call('RENAME', KEYS[1], KEYS[2]) end
  redis.call('HSET', KEYS[1], unpack(kept))
  kept = {}
end
for i = 3, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
    redis.call('HDEL', KEYS[2], ARGV[i])
  else
    kept[#kept + 1] = ARGV[i]
    kept[#kept + 1] = ARGV[i + 1]
    if #kept == 1000 then keep() end
  end
end
keep()
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[2])
return 1
