-- Move a claimed batch to its next stage.
-- KEYS batch, due, counts, work
-- ARGV id, seq, next stage, work ('' = leave as it is), overdue ms, wire version of the work
-- returns 1, or 0 when the claim is no longer ours (nothing is changed)
-- invariant: compare-and-set on (claim number, deadline): a worker that lost its claim cannot move the batch.
local batch = fields(KEYS[1])
if not holds(batch, ARGV[2]) then return 0 end
if ARGV[4] ~= '' then
  redis.call('SET', KEYS[4], ARGV[4])
  redis.call('HSET', KEYS[1], 'work_wire', ARGV[6])
end
redis.call('HSET', KEYS[1], 'state', ARGV[3], 'owner', '', 'deadline', 0, 'attempts', 0, 'not_before', 0, 'error', '')
redis.call('ZADD', KEYS[2], now_ms() + tonumber(ARGV[5]), ARGV[1])
redis.call('HINCRBY', KEYS[3], 'stage:' .. batch.state, -1)
redis.call('HINCRBY', KEYS[3], 'stage:' .. ARGV[3], 1)
return 1
