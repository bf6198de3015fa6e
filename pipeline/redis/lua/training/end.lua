-- End a training, and queue it again where that can help.
-- KEYS training, lease, now, training of the retry, queue, keys, trainings, ended
-- ARGV the struct EndArgs (controller/arguments.py) as msgpack
-- returns 'ended' | 'alive' (its trainer still holds the lease) | 'lost' (it had ended, or is somebody else's)
-- invariant: a training ends once, and is queued again in the same step, so never twice.
local a = cmsgpack.unpack(ARGV[1])
local training = fields(KEYS[1])
if not training.state or training.ended_ms or training.state == 'queued' then return 'lost' end
local now = now_ms()
if a.token == '' then
  local lease = fields(KEYS[2])
  if lease.token == training.token and (lease.holder or '') ~= '' and tonumber(lease.deadline) > now then return 'alive' end
elseif training.token ~= a.token then
  return 'lost'
end
redis.call('HSET', KEYS[1], 'state', a.state, 'status', a.status, 'ended_ms', now, 'retried_as', a.retry_id)
redis.call('EXPIRE', KEYS[1], a.keep_s)
if redis.call('GET', KEYS[3]) == a.request_id then redis.call('DEL', KEYS[3]) end
count_ended(KEYS[8], KEYS[7], a.request_id, a.keep)
if a.retry_id == '' then return 'ended' end
local equal = redis.call('HGET', KEYS[6], a.retry_key)
if equal and redis.call('ZSCORE', KEYS[5], equal) then
  redis.call('HSET', KEYS[1], 'retried_as', equal)
  return 'ended'
end
queue_training(KEYS[4], KEYS[5], KEYS[6], KEYS[7], a.retry_id, a.retry_key, a.retry, a.pause_ms)
return 'ended'
