-- Adds what a process has counted of its senders.
-- KEYS senders, the time of the last sign of each
-- ARGV most, ttl in s, and then of each sender: name, lines, requests, refused, duplicates
-- returns how many senders were forgotten for others
-- invariant: at most `most` senders; those that were silent for longest go first. One of whom nothing but refusals is known makes
--            no entry, so that strangers drive nobody out.
local SENDERS, HEARD, most, now = KEYS[1], KEYS[2], tonumber(ARGV[1]), now_ms()
for i = 3, #ARGV, 5 do
  local name, known = ARGV[i], redis.call('HGET', SENDERS, ARGV[i])
  if known or tonumber(ARGV[i + 2]) > tonumber(ARGV[i + 3]) then
    local sender = known and cjson.decode(known) or { lines = 0, requests = 0, refused = 0, duplicates = 0, first_ms = now }
    for n, field in ipairs({ 'lines', 'requests', 'refused', 'duplicates' }) do
      sender[field] = sender[field] + tonumber(ARGV[i + n])
    end
    sender.last_ms = now
    redis.call('HSET', SENDERS, name, cjson.encode(sender))
    redis.call('ZADD', HEARD, now, name)
  end
end
local surplus = redis.call('ZCARD', HEARD) - most
if surplus > 0 then
  redis.call('HDEL', SENDERS, unpack(redis.call('ZRANGE', HEARD, 0, surplus - 1)))
  redis.call('ZREMRANGEBYRANK', HEARD, 0, surplus - 1)
end
for _, key in ipairs({ SENDERS, HEARD }) do redis.call('EXPIRE', key, ARGV[2]) end
return math.max(0, surplus)
