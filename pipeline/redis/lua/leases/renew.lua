-- Keep a lease.
-- KEYS lease
-- ARGV holder, token, ttl ms
-- returns 1, or 0 when the lease is lost
-- invariant: holder and token must both match and the deadline must not have passed; a lost lease stays lost.
local now, lease = now_ms(), fields(KEYS[1])
if lease.holder ~= ARGV[1] or lease.token ~= ARGV[2] or tonumber(lease.deadline) <= now then return 0 end
redis.call('HSET', KEYS[1], 'deadline', now + tonumber(ARGV[3]))
return 1
