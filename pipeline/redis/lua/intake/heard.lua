-- Adds what a process has counted of its senders.
-- KEYS senders
-- ARGV most, ttl in s, and then of each sender: name, lines, requests, refused, duplicates
-- returns how many senders were forgotten for others
-- invariant: at most `most` senders; the one that was silent for longest goes first.
local SENDERS, most, now, forgotten = KEYS[1], tonumber(ARGV[1]), now_ms(), 0
for i = 3, #ARGV, 5 do
  local name, known = ARGV[i], redis.call('HGET', SENDERS, ARGV[i])
  if not known and redis.call('HLEN', SENDERS) >= most then
    local oldest, at = nil, nil
    for other, text in pairs(fields(SENDERS)) do
      local last = cjson.decode(text).last_ms
      if not at or last < at then oldest, at = other, last end
    end
    redis.call('HDEL', SENDERS, oldest)
    forgotten = forgotten + 1
  end
  local sender = known and cjson.decode(known) or { lines = 0, requests = 0, refused = 0, duplicates = 0, first_ms = now }
  for n, field in ipairs({ 'lines', 'requests', 'refused', 'duplicates' }) do
    sender[field] = sender[field] + tonumber(ARGV[i + n])
  end
  sender.last_ms = now
  redis.call('HSET', SENDERS, name, cjson.encode(sender))
end
redis.call('EXPIRE', SENDERS, ARGV[2])
return forgotten
