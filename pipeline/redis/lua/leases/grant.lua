-- Grant a lease on one resource.
-- KEYS lease, shared leases (token:holder), tokens, epoch
-- ARGV resource, mode ('shared' | 'exclusive'), holder, ttl ms, token floor, quarantine ms (0 = none)
-- returns {'granted', token} | {'held', ms until it could be free} | {'quarantine', ms left}
-- invariant: never an exclusive holder beside any other; tokens only grow, above every token the floor names.
--            A waiting exclusive need closes the door to new shared ones. After Redis changed (restart,
--            failover, first use) nothing exclusive is granted for one TTL: an old holder may still run.
local now = now_ms()
local ttl = tonumber(ARGV[4])
local lease = fields(KEYS[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local held = lease.holder ~= nil and lease.holder ~= '' and tonumber(lease.deadline) > now
local function token()
  local newest = tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or '0')
  local next = math.max(newest, tonumber(ARGV[5])) + 1
  redis.call('HSET', KEYS[3], ARGV[1], next)
  return next
end
if ARGV[2] == 'shared' then
  local waiting = lease.waiting ~= nil and lease.waiting ~= '' and tonumber(lease.waiting_until) > now
  if held then return { 'held', lease.deadline - now } end
  if waiting then return { 'held', lease.waiting_until - now } end
  local given = token()
  redis.call('ZADD', KEYS[2], now + ttl, given .. ':' .. ARGV[3])
  return { 'granted', given }
end
if held and lease.holder == ARGV[3] then
  redis.call('HSET', KEYS[1], 'deadline', now + ttl)
  return { 'granted', tonumber(lease.token) }
end
if tonumber(ARGV[6]) > 0 then
  local id = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)')
  local epoch = fields(KEYS[4])
  if epoch.id ~= id then
    epoch = { id = id, until_ms = now + tonumber(ARGV[6]) }
    redis.call('HSET', KEYS[4], 'id', id, 'until_ms', epoch.until_ms)
  end
  -- At most one TTL, also when the clock was set back.
  local left = math.min(tonumber(ARGV[6]), epoch.until_ms - now)
  if left > 0 then return { 'quarantine', left } end
end
if held then return { 'held', lease.deadline - now } end
local first = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')
if #first > 0 then
  -- Close the door; it opens again by itself if the one who waits does not come back.
  redis.call('HSET', KEYS[1], 'waiting', ARGV[3], 'waiting_until', now + ttl)
  return { 'held', math.floor(tonumber(first[2])) - now }
end
local given = token()
redis.call('HSET', KEYS[1], 'holder', ARGV[3], 'token', given, 'deadline', now + ttl, 'since', now, 'waiting', '', 'waiting_until', 0)
return { 'granted', given }
