-- Give a lease back.
-- KEYS as in gpu/_gpu.lua
-- ARGV the struct ReleaseArgs (gpu/leasing/arguments.py) as msgpack
-- returns {1, or 0 when it was not theirs any more, how many needs wait}
-- invariant: nobody can release another holder's lease. One whose deadline has passed counts until it is swept, so its
--            holder may still say that it is off.
local a = cmsgpack.unpack(ARGV[1])
local lease = lease_of(a.lease_id)
local waits = redis.call('HLEN', WAITING)
if not lease then return { 0, waits } end
if a.holder == '' then
  if whole(lease.parts[1].token) ~= a.tokens then return { 0, waits } end
elseif lease.holder ~= a.holder or tokens_of(lease) ~= a.tokens then
  return { 0, waits }
end
end_lease(lease, 'released', a.clean and '' or 'its holder did not say that it is off the device', a.clean, a.half_life_s)
return { 1, waits }
