-- Ask for a training.
-- KEYS training, queue, keys (hash: request key -> id, of those that are queued), trainings
-- ARGV id, request key, request (JSON), how many may wait
-- returns {'queued', id} | {'merged', id of the equal one that waits} | {'full', how many wait}
-- invariant: of equal requests at most one waits, and of others so many as may. One that waited for another try begins now: somebody wants it.
-- The same call again, because its answer was lost: it may run by now, and must not wait once more.
if redis.call('EXISTS', KEYS[1]) == 1 then return { 'queued', ARGV[1] } end
local equal = redis.call('HGET', KEYS[3], ARGV[2])
local due = equal and redis.call('ZSCORE', KEYS[2], equal)
if due then
  -- Its not_before_ms goes on telling how long it would have waited; the queue decides.
  if tonumber(due) > now_ms() then redis.call('ZADD', KEYS[2], now_ms(), equal) end
  return { 'merged', equal }
end
local waiting = redis.call('ZCARD', KEYS[2])
if waiting >= tonumber(ARGV[4]) then return { 'full', tostring(waiting) } end
queue_training(KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1], ARGV[2], ARGV[3], 0)
return { 'queued', ARGV[1] }
