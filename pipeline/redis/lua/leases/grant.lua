-- Grant the lease on one resource.
-- KEYS lease, tokens, epoch
-- ARGV resource, holder, ttl ms, token floor, quarantine ms (0 = none)
-- returns {'granted', token} | {'held', ms until it could be free} | {'quarantine', ms left}
-- invariant: one holder at a time; tokens only grow, above every token that the floor names. After Redis changed
--            (restart, failover, first use) a quarantined resource is not granted for one TTL: an old holder may run.
local now, ttl = now_ms(), tonumber(ARGV[3])
local lease = fields(KEYS[1])
local held = lease.holder ~= nil and lease.holder ~= '' and tonumber(lease.deadline) > now
if held and lease.holder == ARGV[2] then
  redis.call('HSET', KEYS[1], 'deadline', now + ttl)
  return { 'granted', tonumber(lease.token) }
end
local quarantine = tonumber(ARGV[5])
if quarantine > 0 then
  local id = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)')
  local epoch = fields(KEYS[3])
  if epoch.id ~= id then
    epoch = { id = id, until_ms = now + quarantine }
    redis.call('HSET', KEYS[3], 'id', id, 'until_ms', epoch.until_ms)
  end
  -- At most one TTL, also when the clock was set back.
  local left = math.min(quarantine, epoch.until_ms - now)
  if left > 0 then return { 'quarantine', left } end
end
if held then return { 'held', lease.deadline - now } end
local token = math.max(tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0'), tonumber(ARGV[4])) + 1
redis.call('HSET', KEYS[2], ARGV[1], token)
redis.call('HSET', KEYS[1], 'holder', ARGV[2], 'token', token, 'deadline', now + ttl, 'since', now)
return { 'granted', token }
