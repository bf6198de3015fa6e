-- The holder begins: from now on its processes may be on the devices.
-- KEYS as in gpu/_gpu.lua
-- ARGV the struct ActivateArgs (gpu/leasing/arguments.py) as msgpack
-- returns 1, or 0 when the lease is lost
-- invariant: nobody begins before this, so a lease that was only granted leaves nothing behind when it ends. A long one
--            has its whole time only from here on: whoever died before it began keeps nobody waiting.
local a = cmsgpack.unpack(ARGV[1])
local lease = lease_of(a.lease_id)
if not lease or lease.holder ~= a.holder or tokens_of(lease) ~= a.tokens or deadline_of(a.lease_id) <= now then return 0 end
local pids, known = lease.pids or {}, {}
for _, pid in ipairs(pids) do known[pid] = true end
for _, pid in ipairs(a.pids) do
  if not known[pid] then
    pids[#pids + 1], known[pid] = pid, true
  end
end
lease.state, lease.host, lease.pids = 'active', a.host, pids
redis.call('HSET', LEASES, a.lease_id, cjson.encode(lease))
redis.call('ZADD', DEADLINES, 'XX', whole(now + lease.ttl_ms), a.lease_id)
return 1
