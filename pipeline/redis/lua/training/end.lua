-- End a training, and queue it again where that can help.
-- KEYS training, lease, now, training of the retry, queue, keys, trainings, ended
-- ARGV id, token ('' = the sweep: only when nobody holds its lease), state, status (JSON), keep s,
--      retry id ('' = none), retry key, retry request (JSON), pause ms, how many are remembered
-- returns 'ended' | 'alive' (its trainer still holds the lease) | 'lost' (it had ended, or is somebody else's)
-- invariant: a training ends once, and is queued again in the same step, so never twice.
local training = fields(KEYS[1])
if not training.state or training.ended_ms or training.state == 'queued' then return 'lost' end
local now = now_ms()
if ARGV[2] == '' then
  local lease = fields(KEYS[2])
  if lease.token == training.token and (lease.holder or '') ~= '' and tonumber(lease.deadline) > now then return 'alive' end
elseif training.token ~= ARGV[2] then
  return 'lost'
end
redis.call('HSET', KEYS[1], 'state', ARGV[3], 'status', ARGV[4], 'ended_ms', now, 'retried_as', ARGV[6])
redis.call('EXPIRE', KEYS[1], ARGV[5])
if redis.call('GET', KEYS[3]) == ARGV[1] then redis.call('DEL', KEYS[3]) end
count_ended(KEYS[8], KEYS[7], ARGV[1], ARGV[10])
if ARGV[6] == '' then return 'ended' end
local equal = redis.call('HGET', KEYS[6], ARGV[7])
if equal and redis.call('ZSCORE', KEYS[5], equal) then
  redis.call('HSET', KEYS[1], 'retried_as', equal)
  return 'ended'
end
queue_training(KEYS[4], KEYS[5], KEYS[6], KEYS[7], ARGV[6], ARGV[7], ARGV[8], ARGV[9])
return 'ended'
