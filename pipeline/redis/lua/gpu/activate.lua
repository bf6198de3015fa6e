-- The holder begins: from now on its processes may be on the devices.
-- KEYS as in gpu/_gpu.lua
-- ARGV lease, holder, tokens, host, process ids separated by spaces
-- returns 1, or 0 when the lease is lost
-- invariant: nobody begins before this, so a lease that was only granted leaves nothing behind when it ends. A long one
--            has its whole time only from here on: whoever died before it began keeps nobody waiting.
local lease = lease_of(ARGV[1])
if not lease or lease.holder ~= ARGV[2] or tokens_of(lease) ~= ARGV[3] or deadline_of(ARGV[1]) <= now then return 0 end
local pids, known = lease.pids or {}, {}
for _, pid in ipairs(pids) do known[pid] = true end
for word in string.gmatch(ARGV[5], '%d+') do
  local pid = tonumber(word)
  if not known[pid] then
    pids[#pids + 1], known[pid] = pid, true
  end
end
lease.state, lease.host, lease.pids = 'active', ARGV[4], pids
redis.call('HSET', LEASES, ARGV[1], cjson.encode(lease))
redis.call('ZADD', DEADLINES, 'XX', whole(now + lease.ttl_ms), ARGV[1])
return 1
