-- Begin the training that waits longest.
-- KEYS training, queue, keys, lease, now, training that ran last (as `now` says), events
-- ARGV the struct TakeArgs (controller/arguments.py) as msgpack
-- returns 'taken' | 'gone' (it does not wait any more) | 'early' | 'stale' (the lease is not the caller's)
--         | 'unended' (the one before died and was not ended yet: it would be forgotten, and look alive for ever)
-- invariant: only the live holder of the training lease begins one, and only when the one before has ended; so at
--            most one runs.
local a = cmsgpack.unpack(ARGV[1])
local lease = fields(KEYS[4])
local now = now_ms()
if lease.holder ~= a.holder or lease.token ~= a.token or tonumber(lease.deadline) <= now then return 'stale' end
local before = redis.call('GET', KEYS[5])
if before then
  -- The same call again, because its answer was lost.
  local own = fields(KEYS[1])
  if before == a.request_id and own.token == a.token and not own.ended_ms then return 'taken' end
  local last = fields(KEYS[6])
  if before ~= a.before or (last.state and not last.ended_ms) then return 'unended' end
end
local due = redis.call('ZSCORE', KEYS[2], a.request_id)
if not due then return 'gone' end
if tonumber(due) > now then return 'early' end
redis.call('ZREM', KEYS[2], a.request_id)
local training = fields(KEYS[1])
if training.key and redis.call('HGET', KEYS[3], training.key) == a.request_id then redis.call('HDEL', KEYS[3], training.key) end
if training.state ~= 'queued' then return 'gone' end
redis.call('HSET', KEYS[1], 'state', 'fetching', 'token', a.token, 'started_ms', now)
redis.call('SET', KEYS[5], a.request_id)
local readable, request = pcall(cjson.decode, training.request or '')
if not readable or type(request) ~= 'table' then request = {} end
add_event(KEYS[7], 'training.started', a.request_id, cjson.encode({ training = a.request_id, model = request.model,
  asked_by = request.asked_by, why = request.why, attempt = request.attempt, retry_of = request.retry_of }))
return 'taken'
