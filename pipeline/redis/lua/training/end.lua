-- End a training, and queue it again where that can help.
-- KEYS training, lease, now, training of the retry, queue, keys, trainings, ended, events
-- ARGV the struct EndArgs (controller/arguments.py) as msgpack
-- returns 'ended' | 'alive' (its trainer still holds the lease) | 'lost' (it had ended, or is somebody else's)
-- invariant: a training ends once, and is queued again in the same step, so never twice. Its events are of that step.
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
local retried_as = a.retry_id
if a.retry_id ~= '' then
  local equal = redis.call('HGET', KEYS[6], a.retry_key)
  if equal and redis.call('ZSCORE', KEYS[5], equal) then
    redis.call('HSET', KEYS[1], 'retried_as', equal)
    retried_as = equal
  else
    queue_training(KEYS[4], KEYS[5], KEYS[6], KEYS[7], a.retry_id, a.retry_key, a.retry, a.pause_ms)
  end
end
if a.state == 'completed' and not a.published then
  add_event(KEYS[9], 'model.rejected', a.version, cjson.encode({ version = a.version, model = a.model, reason = a.reason,
    training = a.request_id }))
end
add_event(KEYS[9], 'training.ended', a.request_id, cjson.encode({ training = a.request_id, model = a.model, state = a.state,
  version = a.version, published = a.published, reason = a.reason, retried_as = retried_as }))
return 'ended'
