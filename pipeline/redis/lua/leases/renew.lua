-- Keep a lease.
-- KEYS lease, shared leases (token:holder)
-- ARGV mode, holder, token, ttl ms
-- returns 1, or 0 when the lease is lost
-- invariant: holder and token must both match and the deadline must not have passed; a lost lease stays lost.
local now = now_ms()
if ARGV[1] == 'shared' then
  local member = ARGV[3] .. ':' .. ARGV[2]
  local deadline = redis.call('ZSCORE', KEYS[2], member)
  if not deadline or tonumber(deadline) <= now then return 0 end
  redis.call('ZADD', KEYS[2], 'XX', now + tonumber(ARGV[4]), member)
  return 1
end
local lease = fields(KEYS[1])
if lease.holder ~= ARGV[2] or lease.token ~= ARGV[3] or tonumber(lease.deadline) <= now then return 0 end
redis.call('HSET', KEYS[1], 'deadline', now + tonumber(ARGV[4]))
return 1
