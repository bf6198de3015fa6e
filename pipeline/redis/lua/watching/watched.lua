-- A round of the watcher: what it has made of the oldest observations, and that they are seen.
-- KEYS lease, observations, watching, sessions, pulses, rates, incidents, outbox, pasts, when each of those is forgotten, then one idle
--      set per lane
-- ARGV token, head (observations ever taken from the list, with those of this round), incidents ('' = as they were),
--      name of the round that was the last one when this one read ('' = none), name of this one, SHA-1 of the newest
--      observation that it read ('' = none), then eight sections, each its number of entries and them: sessions that stay open (name, number of the lane, due ms,
--      state), sessions that are over (name), pasts of sessions (name, when it is forgotten in ms, state), names whose past is
--      forgotten, pulses (workload, state), rates (workload, state), workloads that are
--      forgotten (name), rows to be stored (entry), fields of `watching` (name, value)
-- returns 1, or 0 when the token is not the holder's, or this is not what the round has read: a Redis that lost its last
--         moments gives tokens again, has states without what was folded in, and will be told the same batches again
-- invariant: states, rows and the list change together or not at all, so every observation is in the states once.
local held = redis.call('HMGET', KEYS[1], 'token', 'deadline')
if held[1] ~= ARGV[1] or tonumber(held[2] or '0') <= now_ms() then return 0 end
if (redis.call('HGET', KEYS[3], 'round') or '') ~= ARGV[4] then return 0 end
local head = tonumber(redis.call('HGET', KEYS[3], 'head') or '0')
if ARGV[6] ~= '' and head < tonumber(ARGV[2]) then
  local newest = redis.call('LINDEX', KEYS[2], tonumber(ARGV[2]) - head - 1)
  if not newest or redis.sha1hex(newest) ~= ARGV[6] then return 0 end
end
local at = 7
local function section(width, each)
  local last = at + tonumber(ARGV[at]) * width
  for i = at + 1, last, width do each(i) end
  at = last + 1
end
-- The oldest may have been dropped at the limit since they were read: no other may go in their place.
local bytes = 0
for _ = head + 1, tonumber(ARGV[2]) do
  local seen = redis.call('LPOP', KEYS[2])
  if not seen then break end
  bytes, head = bytes + #seen, head + 1
end
redis.call('HINCRBY', KEYS[3], 'bytes', 0 - bytes)
redis.call('HSET', KEYS[3], 'head', head, 'round_ms', now_ms(), 'round', ARGV[5])
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('HSET', KEYS[3], 'bytes', 0) end
if ARGV[3] ~= '' then redis.call('SET', KEYS[7], ARGV[3]) end
section(4, function(i)
  for lane = 11, #KEYS do
    if lane ~= 10 + tonumber(ARGV[i + 1]) then redis.call('ZREM', KEYS[lane], ARGV[i]) end
  end
  redis.call('ZADD', KEYS[10 + tonumber(ARGV[i + 1])], ARGV[i + 2], ARGV[i])
  redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 3])
end)
section(1, function(i)
  for lane = 11, #KEYS do redis.call('ZREM', KEYS[lane], ARGV[i]) end
  redis.call('HDEL', KEYS[4], ARGV[i])
end)
section(3, function(i)
  redis.call('ZADD', KEYS[10], ARGV[i + 1], ARGV[i])
  redis.call('HSET', KEYS[9], ARGV[i], ARGV[i + 2])
end)
section(1, function(i)
  redis.call('ZREM', KEYS[10], ARGV[i])
  redis.call('HDEL', KEYS[9], ARGV[i])
end)
section(2, function(i) redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end)
section(2, function(i) redis.call('HSET', KEYS[6], ARGV[i], ARGV[i + 1]) end)
section(1, function(i)
  redis.call('HDEL', KEYS[5], ARGV[i])
  redis.call('HDEL', KEYS[6], ARGV[i])
  redis.call('HDEL', KEYS[3], 'lost ' .. ARGV[i])
end)
section(1, function(i) redis.call('RPUSH', KEYS[8], ARGV[i]) end)
section(2, function(i) redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end)
return 1
