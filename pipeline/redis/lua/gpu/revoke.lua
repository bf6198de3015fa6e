-- Take a lease away.
-- KEYS as in gpu/_gpu.lua
-- ARGV lease, why, half-life s
-- returns 1, or 0 when there is no such lease
-- invariant: what an active lease held goes on counting until its node no longer sees its processes.
local lease = lease_of(ARGV[1])
if not lease then return 0 end
end_lease(lease, 'revoked', ARGV[2], false, ARGV[3])
return 1
