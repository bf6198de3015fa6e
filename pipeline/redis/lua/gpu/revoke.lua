-- Take a lease away.
-- KEYS as in gpu/_gpu.lua
-- ARGV the struct RevokeArgs (gpu/leasing/arguments.py) as msgpack
-- returns 1, or 0 when there is no such lease
-- invariant: what an active lease held goes on counting until its node no longer sees its processes.
local a = cmsgpack.unpack(ARGV[1])
local lease = lease_of(a.lease_id)
if not lease then return 0 end
end_lease(lease, 'revoked', a.why, false, a.half_life_s)
return 1
