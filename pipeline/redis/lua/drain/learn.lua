-- The learner's write: templates and verdicts together, refused to a learner that lost its lease.
-- KEYS lease, templates, template counts, young verdicts, old verdicts, templates to be told, changes of templates
-- ARGV token ('' = not fenced), cache limit, ttl s, number of templates, 1 when others are to be told of templates,
--      1 when learners of other shards follow,
--      then per template: id, msgpack, workload to count it for ('' = changed, not new),
--      then pairs of verdict key and verdict
-- returns 1, or 0 when the token is not the holder's
-- invariant: a template id once written is never given to another template; the cache holds at most
--            `limit` verdicts: when the young half is full it becomes the old half (two-generation LRU).
if ARGV[1] ~= '' then
  local held = redis.call('HMGET', KEYS[1], 'token', 'deadline')
  if held[1] ~= ARGV[1] or tonumber(held[2] or '0') <= now_ms() then return 0 end
end
local n = tonumber(ARGV[4])
local at = 7
-- Somebody who counted from elsewhere has given this id meanwhile: whoever asks reads everything back and goes on above it.
for i = 7, 4 + 3 * n, 3 do
  local there = ARGV[i + 2] ~= '' and redis.call('HGET', KEYS[2], ARGV[i])
  if there and there ~= ARGV[i + 1] then return 0 end
end
local change = 0
if n > 0 and ARGV[6] == '1' then change = tonumber(redis.call('ZREVRANGE', KEYS[7], 0, 0, 'WITHSCORES')[2] or '0') end
for _ = 1, n do
  -- Redis may run a script again whose answer was lost, so only the first write of an id counts.
  local first = redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1]) == 1
  if first and ARGV[at + 2] ~= '' then redis.call('HINCRBY', KEYS[3], ARGV[at + 2], 1) end
  if ARGV[5] == '1' then redis.call('HINCRBY', KEYS[6], ARGV[at], 1) end
  if ARGV[6] == '1' then
    change = change + 1
    redis.call('ZADD', KEYS[7], change, ARGV[at])
  end
  at = at + 3
end
if at <= #ARGV then
  local half = math.max(1, math.floor(tonumber(ARGV[2]) / 2))
  for i = at, #ARGV, 2 do
    if redis.call('HLEN', KEYS[4]) >= half then redis.call('RENAME', KEYS[4], KEYS[5]) end
    redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 1])
  end
  redis.call('EXPIRE', KEYS[4], ARGV[3])
  redis.call('EXPIRE', KEYS[5], ARGV[3])
end
return 1
