-- Grant the lease on one resource.
-- KEYS lease, tokens, epoch
-- ARGV the struct GrantArgs (redis/leases.py) as msgpack
-- returns {'granted', token} | {'held', ms until it could be free} | {'quarantine', ms left}
-- invariant: one holder at a time; tokens only grow, above every token that the floor names. After Redis changed
--            (restart, failover, first use) a quarantined resource is not granted for one TTL: an old holder may run.
local a = cmsgpack.unpack(ARGV[1])
local now, ttl = now_ms(), a.ttl_ms
local lease = fields(KEYS[1])
local held = lease.holder ~= nil and lease.holder ~= '' and tonumber(lease.deadline) > now
if held and lease.holder == a.holder then
  redis.call('HSET', KEYS[1], 'deadline', now + ttl)
  return { 'granted', tonumber(lease.token) }
end
local quarantine = a.quarantine_ms
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
local token = math.max(tonumber(redis.call('HGET', KEYS[2], a.resource) or '0'), a.floor) + 1
redis.call('HSET', KEYS[2], a.resource, token)
redis.call('HSET', KEYS[1], 'holder', a.holder, 'token', token, 'deadline', now + ttl, 'since', now)
return { 'granted', token }
