-- Keep a lease.
-- KEYS lease
-- ARGV the struct RenewArgs (redis/leases.py) as msgpack
-- returns 1, or 0 when the lease is lost
-- invariant: holder and token must both match and the deadline must not have passed; a lost lease stays lost.
local a = cmsgpack.unpack(ARGV[1])
local now, lease = now_ms(), fields(KEYS[1])
if lease.holder ~= a.holder or lease.token ~= a.token or tonumber(lease.deadline) <= now then return 0 end
redis.call('HSET', KEYS[1], 'deadline', now + a.ttl_ms)
return 1
