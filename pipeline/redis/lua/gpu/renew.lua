-- Keep a lease.
-- KEYS as in gpu/_gpu.lua
-- ARGV lease, holder, tokens
-- returns {'', deadline ms, yield by ms | '', why to yield} | {why it is lost}
-- invariant: holder and every token must match and the deadline must not have passed; a lost lease stays lost.
local lease = lease_of(ARGV[1])
if not lease then return { redis.call('GET', ENDED .. ':' .. ARGV[1]) or 'Redis does not know it any more' } end
if lease.holder ~= ARGV[2] or tokens_of(lease) ~= ARGV[3] then return { 'its name belongs to another lease now' } end
if deadline_of(ARGV[1]) <= now then return { 'expired' } end
local deadline, by = whole(now + lease.ttl_ms), lease.yield_by_ms
redis.call('ZADD', DEADLINES, 'XX', deadline, ARGV[1])
if type(by) ~= 'number' then return { '', deadline, '', '' } end
return { '', deadline, whole(by), lease.yield_why or '' }
