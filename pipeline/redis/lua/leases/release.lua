-- Give a lease back.
-- KEYS lease, shared leases (token:holder)
-- ARGV mode, holder, token
-- returns 1, or 0 when it was not ours any more
-- invariant: nobody can release another holder's lease.
if ARGV[1] == 'shared' then return redis.call('ZREM', KEYS[2], ARGV[3] .. ':' .. ARGV[2]) end
local lease = fields(KEYS[1])
if lease.holder ~= ARGV[2] or lease.token ~= ARGV[3] then return 0 end
redis.call('HDEL', KEYS[1], 'holder', 'deadline', 'since')
return 1
