-- Stop a training.
-- KEYS training, queue, keys, trainings, ended, events
-- ARGV the struct CancelArgs (controller/arguments.py) as msgpack
-- returns 'cancelled' (it had not begun) | 'asked' (its process stops at the next step) | 'ended' | 'unknown'
local a = cmsgpack.unpack(ARGV[1])
local training = fields(KEYS[1])
if not training.state then return 'unknown' end
-- Cancelled already: the same call again, because its answer was lost.
if training.ended_ms then return training.state == 'cancelled' and 'cancelled' or 'ended' end
if training.state ~= 'queued' then
  redis.call('HSET', KEYS[1], 'cancel', 1)
  return 'asked'
end
redis.call('ZREM', KEYS[2], a.request_id)
if redis.call('HGET', KEYS[3], training.key) == a.request_id then redis.call('HDEL', KEYS[3], training.key) end
redis.call('HSET', KEYS[1], 'state', 'cancelled', 'status', '{"reason":"an operator cancelled it before it began"}',
  'ended_ms', now_ms())
redis.call('EXPIRE', KEYS[1], a.keep_s)
count_ended(KEYS[5], KEYS[4], a.request_id, a.keep)
add_event(KEYS[6], 'training.ended', a.request_id, cjson.encode({ training = a.request_id, model = a.model,
  state = 'cancelled', version = '', published = false, reason = 'an operator cancelled it before it began',
  retried_as = '' }))
return 'cancelled'
