-- Keep a claim alive while its holder works.
-- KEYS batch, due
-- ARGV id, seq, ttl ms
-- returns 1, or 0 when the claim is no longer ours
-- invariant: an expired claim cannot be revived; somebody may already be working on the batch.
if not holds(fields(KEYS[1]), ARGV[2]) then return 0 end
local deadline = now_ms() + tonumber(ARGV[3])
redis.call('HSET', KEYS[1], 'deadline', deadline)
redis.call('ZADD', KEYS[2], deadline, ARGV[1])
return 1
