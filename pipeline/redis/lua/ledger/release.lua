-- Give a claimed batch back, to be tried again.
-- KEYS batch, due
-- ARGV the struct ReleaseArgs (ledger/arguments.py) as msgpack
-- returns 1, or 0 when the claim is no longer ours
-- invariant: only faults of the batch count towards its bound; a full disk or an absent Redis never kills a batch.
local a = cmsgpack.unpack(ARGV[1])
local batch = fields(KEYS[1])
if not holds(batch, a.seq) then return 0 end
local again = now_ms() + a.delay_ms
if not a.counted then redis.call('HINCRBY', KEYS[1], 'attempts', -1) end
redis.call('HSET', KEYS[1], 'owner', '', 'deadline', 0, 'not_before', again, 'error', a.reason)
redis.call('ZADD', KEYS[2], again, a.batch_id)
return 1
