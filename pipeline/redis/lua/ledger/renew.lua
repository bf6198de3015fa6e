-- Keep a claim alive while its holder works.
-- KEYS batch, due
-- ARGV the struct RenewArgs (ledger/arguments.py) as msgpack
-- returns 1, or 0 when the claim is no longer ours
-- invariant: an expired claim cannot be revived; somebody may already be working on the batch.
local a = cmsgpack.unpack(ARGV[1])
if not holds(fields(KEYS[1]), a.seq) then return 0 end
local deadline = now_ms() + a.ttl_ms
redis.call('HSET', KEYS[1], 'deadline', deadline)
redis.call('ZADD', KEYS[2], deadline, a.batch_id)
return 1
