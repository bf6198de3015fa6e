-- Keep a lease.
-- KEYS as in gpu/_gpu.lua
-- ARGV the struct RenewArgs (gpu/leasing/arguments.py) as msgpack
-- returns {'', deadline ms, yield by ms | '', why to yield} | {why it is lost}
-- invariant: holder and every token must match and the deadline must not have passed; a lost lease stays lost.
local a = cmsgpack.unpack(ARGV[1])
local lease = lease_of(a.lease_id)
if not lease then return { redis.call('GET', ENDED .. ':' .. a.lease_id) or 'Redis does not know it any more' } end
if lease.holder ~= a.holder or tokens_of(lease) ~= a.tokens then return { 'its name belongs to another lease now' } end
if deadline_of(a.lease_id) <= now then return { 'expired' } end
local deadline, by = whole(now + lease.ttl_ms), lease.yield_by_ms
redis.call('ZADD', DEADLINES, 'XX', deadline, a.lease_id)
if type(by) ~= 'number' then return { '', deadline, '', '' } end
return { '', deadline, whole(by), lease.yield_why or '' }
