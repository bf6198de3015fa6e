-- Give a lease back.
-- KEYS lease
-- ARGV holder, token
-- returns 1, or 0 when it belonged to another holder already
-- invariant: no process can release another holder's lease.
local lease = fields(KEYS[1])
if lease.holder ~= ARGV[1] or lease.token ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], 'holder', 'deadline', 'since')
return 1
