-- Give a claimed batch back, to be tried again.
-- KEYS batch, due
-- ARGV id, seq, delay ms, reason, counted ('1': this attempt was the batch's fault)
-- returns 1, or 0 when the claim is no longer ours
-- invariant: only faults of the batch count towards its bound; a full disk or an absent Redis never kills a batch.
local batch = fields(KEYS[1])
if not holds(batch, ARGV[2]) then return 0 end
local again = now_ms() + tonumber(ARGV[3])
if ARGV[5] ~= '1' then redis.call('HINCRBY', KEYS[1], 'attempts', -1) end
redis.call('HSET', KEYS[1], 'owner', '', 'deadline', 0, 'not_before', again, 'error', ARGV[4])
redis.call('ZADD', KEYS[2], again, ARGV[1])
return 1
