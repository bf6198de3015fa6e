-- Ask for a training.
-- KEYS training, queue, keys (hash: request key -> id, of those that are queued), trainings
-- ARGV the struct RequestArgs (controller/arguments.py) as msgpack
-- returns {'queued', id} | {'merged', id of the equal one that waits} | {'full', how many wait}
-- invariant: of equal requests at most one waits, and of others so many as may. One that waited for another try begins now: somebody wants it.
local a = cmsgpack.unpack(ARGV[1])
-- The same call again, because its answer was lost: it may run by now, and must not wait once more.
if redis.call('EXISTS', KEYS[1]) == 1 then return { 'queued', a.request_id } end
local equal = redis.call('HGET', KEYS[3], a.key)
local due = equal and redis.call('ZSCORE', KEYS[2], equal)
if due then
  -- Its not_before_ms goes on telling how long it would have waited; the queue decides.
  if tonumber(due) > now_ms() then redis.call('ZADD', KEYS[2], now_ms(), equal) end
  return { 'merged', equal }
end
local waiting = redis.call('ZCARD', KEYS[2])
if waiting >= a.most then return { 'full', tostring(waiting) } end
queue_training(KEYS[1], KEYS[2], KEYS[3], KEYS[4], a.request_id, a.key, a.request, 0)
return { 'queued', a.request_id }
