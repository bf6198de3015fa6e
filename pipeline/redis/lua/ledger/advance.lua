-- Move a claimed batch to its next stage.
-- KEYS batch, due, counts, work
-- ARGV the struct AdvanceArgs (ledger/arguments.py) as msgpack, work ('' = leave as it is)
-- returns 1, or 0 when the claim is no longer ours (nothing is changed)
-- invariant: compare-and-set on (claim number, deadline): a worker that lost its claim cannot move the batch.
local a = cmsgpack.unpack(ARGV[1])
local batch = fields(KEYS[1])
if not holds(batch, a.seq) then return 0 end
if ARGV[2] ~= '' then
  redis.call('SET', KEYS[4], ARGV[2])
  redis.call('HSET', KEYS[1], 'work_wire', a.work_wire)
end
redis.call('HSET', KEYS[1], 'state', a.stage, 'owner', '', 'deadline', 0, 'attempts', 0, 'not_before', 0, 'error', '')
redis.call('ZADD', KEYS[2], now_ms() + a.overdue_ms, a.batch_id)
redis.call('HINCRBY', KEYS[3], 'stage:' .. batch.state, -1)
redis.call('HINCRBY', KEYS[3], 'stage:' .. a.stage, 1)
return 1
