-- Give a lease back.
-- KEYS as in gpu/_gpu.lua
-- ARGV lease, holder ('' whoever knows its first token), tokens, '1' = the holder is off the devices, half-life s
-- returns {1, or 0 when it was not theirs any more, how many needs wait}
-- invariant: nobody can release another holder's lease. One whose deadline has passed counts until it is swept, so its
--            holder may still say that it is off.
local lease = lease_of(ARGV[1])
local waits = redis.call('HLEN', WAITING)
if not lease then return { 0, waits } end
if ARGV[2] == '' then
  if whole(lease.parts[1].token) ~= ARGV[3] then return { 0, waits } end
elseif lease.holder ~= ARGV[2] or tokens_of(lease) ~= ARGV[3] then
  return { 0, waits }
end
local clean = ARGV[4] == '1'
end_lease(lease, 'released', clean and '' or 'its holder did not say that it is off the device', clean, ARGV[5])
return { 1, waits }
