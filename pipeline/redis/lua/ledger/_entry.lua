-- Shared by the scripts that begin batches: accept.lua, accept_many.lua, bisect.lua, separate.lua.
-- Writes the payload and the entry of a batch that waits to be claimed, and when the sweeper looks after it. `b` describes the
-- batch; `is` holds state, meta, accepted_ms, attempts, kind, backfill, and the parent where there is one.
local function begin_batch(b, is, keys, payload, overdue_at)
  redis.call('SET', keys.payload, payload)
  redis.call('HSET', keys.batch, 'state', is.state, 'hash', b.content, 'lines', b.lines, 'records', b.records,
    'workload', is.workload, 'meta', is.meta, 'bytes', #payload, 'accepted_ms', is.accepted_ms,
    'attempts', is.attempts, 'seq', 0, 'owner', '', 'deadline', 0, 'not_before', 0, 'kind', is.kind,
    'backfill', is.backfill)
  if is.parent then redis.call('HSET', keys.batch, 'parent', is.parent) end
  redis.call('ZADD', keys.due, overdue_at, b.batch_id)
  redis.call('ZADD', keys.in_flight, in_flight_score(is.kind, is.backfill, is.accepted_ms), b.batch_id)
end
