-- Shared by the scripts of the GPU pool, behind _prelude.lua. All scripts of gpu/leasing/pool_ledger.py get the same KEYS in this
-- order. TOLD and ENDED are the first parts of key names, one key per request; they carry the hash tag of the others.
local NODES, BEATS, DEVICES, LEASES, DEADLINES, YIELDS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local TAKEN, LEFT, WAITING, WAITING_UNTIL, TOKENS, USAGE = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local RESERVATION, EPOCH, FREED, RECORDS, METERED = KEYS[13], KEYS[14], KEYS[15], KEYS[16], KEYS[17]
local DEMAND, DEMAND_WINDOW, REPLICATION, TOLD, ENDED = KEYS[18], KEYS[19], KEYS[20], KEYS[21], KEYS[22]
local EVENTS = KEYS[23]
local TOLD_S, ENDED_S = 60, 600
local RECORDS_MAX = 50000  -- 16 MiB; half a day of one end per second while nobody stores them
local now = now_ms()
local function whole(n) return string.format('%.0f', n) end
-- Something that planning depends on is different: plans made before are stale.
local function changed() redis.call('INCR', EPOCH) end
local function count(field, by)
  if by ~= 0 and redis.call('HINCRBY', TAKEN, field, by) == 0 then redis.call('HDEL', TAKEN, field) end
end
-- A part begins (sign 1) or ceases (sign -1) to count on its device.
local function take(part, exclusive, sign)
  count(part.uuid .. ':mem', sign * part.memory_mib)
  count(part.uuid .. ':cpu', sign * part.compute_percent)
  count(part.uuid .. (exclusive and ':exclusive' or ':shared'), sign)
end
local function taken(uuid)
  local got = redis.call('HMGET', TAKEN, uuid .. ':mem', uuid .. ':cpu', uuid .. ':shared', uuid .. ':exclusive',
    uuid .. ':left')
  for i = 1, 5 do got[i] = tonumber(got[i] or 0) end
  return { memory = got[1], compute = got[2], shared = got[3], exclusive = got[4], left = got[5] }
end
local function nothing_on(uuid)
  local sums = taken(uuid)
  return sums.shared == 0 and sums.exclusive == 0
end
-- Heard of within `ttl`, on this clock alone.
local function beating(node, ttl)
  local beat = redis.call('ZSCORE', BEATS, node)
  return beat and tonumber(beat) + tonumber(ttl) >= now
end
-- Wakes whoever waits for the request; one entry is enough. `news`: the lease that it got, behind its deadline.
local function tell(id, news)
  redis.call('DEL', TOLD .. ':' .. id)
  redis.call('RPUSH', TOLD .. ':' .. id, news or '1')
  redis.call('EXPIRE', TOLD .. ':' .. id, TOLD_S)
end
local function reserved_for(id)
  local text = redis.call('GET', RESERVATION)
  return text and cjson.decode(text).request_id == id
end
local function forget_wait(id)
  redis.call('HDEL', WAITING, id)
  redis.call('ZREM', WAITING_UNTIL, id)
  if reserved_for(id) then redis.call('DEL', RESERVATION) end
  changed()
end
-- How long nothing is granted: one TTL after Redis was restarted, failed over or is new, as in leases/grant.lua (same key).
local function quarantine(ttl)
  local id = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)')
  local known = redis.call('HMGET', REPLICATION, 'id', 'until_ms')
  if known[1] ~= id then
    redis.call('HSET', REPLICATION, 'id', id, 'until_ms', whole(now + tonumber(ttl)))
    return tonumber(ttl)
  end
  return math.max(0, math.min(tonumber(ttl), tonumber(known[2] or 0) - now))  -- a clock set back must not lengthen it
end
-- Dominant-share-seconds of a tenant halve every half-life; nothing decays when the clock went backward.
local function charge(tenant, amount, half_life)
  local value, at = string.match(redis.call('HGET', USAGE, tenant) or '', '^(.-):(%d+)$')
  value, at = tonumber(value or 0), tonumber(at or now)
  if at < now then value, at = value * 2 ^ (-(now - at) / 1000 / half_life), now end
  redis.call('HSET', USAGE, tenant, string.format('%.17g:%.0f', math.max(0, value + amount), at))
end
-- What the lease used in truth, by the closed form of a constant rate that decays, in place of what was prepaid.
local function settle(lease, half_life)
  local half, share, prepaid = tonumber(half_life), tonumber(lease.share or 0), tonumber(lease.prepaid or 0)
  local rest = 2 ^ (-math.max(0, now - lease.granted_ms) / 1000 / half)
  charge(lease.need.tenant, share * half / math.log(2) * (1 - rest) - prepaid * rest, half)
end
local function lease_of(id)
  local text = redis.call('HGET', LEASES, id)
  return text and cjson.decode(text)
end
local function deadline_of(id) return tonumber(redis.call('ZSCORE', DEADLINES, id) or 0) end
local function tokens_of(lease)
  local words = {}
  for i, part in ipairs(lease.parts) do words[i] = part.uuid .. '=' .. whole(part.token) end
  return table.concat(words, ' ')
end
-- The usage record of each part of a lease that ends now, and the sums that Prometheus reads. A lease ends at its
-- deadline at the latest, however late that is found out. `share`: of the device, the larger of memory and compute.
local function meter(lease, how)
  local need, deadline = lease.need, deadline_of(lease.lease_id)
  local ended = math.max(lease.granted_ms, deadline > 0 and math.min(deadline, now) or now)
  for _, part in ipairs(lease.parts) do
    local text, share = redis.call('HGET', DEVICES, part.uuid), 1
    local device = text and cjson.decode(text) or {}
    local size = tonumber(device.schedulable_mib or 0)
    if need.mode ~= 'exclusive' then
      share = math.min(1, math.max(part.compute_percent / 100, size > 0 and part.memory_mib / size or 0))
    end
    if redis.call('XLEN', RECORDS) >= RECORDS_MAX then redis.call('HINCRBY', METERED, 'lost', 1) end
    redis.call('XADD', RECORDS, 'MAXLEN', RECORDS_MAX, '*', 'record', cjson.encode({ v = 1, lease_id = lease.lease_id,
      token = part.token, holder = lease.holder, tenant = need.tenant, kind = need.kind or 'user', mode = need.mode,
      node = device.node or lease.host or '', device = part.uuid, device_name = device.name or '',
      memory_mib = part.memory_mib, compute_percent = part.compute_percent, share = string.format('%.6f', share),
      granted_ms = lease.granted_ms, ended_ms = ended, ended = how }))
    local sum = (need.kind or 'user') .. ':' .. need.tenant
    redis.call('HINCRBY', METERED, sum, math.floor((ended - lease.granted_ms) * share + 0.5))
  end
end
-- Tokens are no part of an event: whoever knows one may end the lease.
local function lease_event(kind, lease, more)
  local need, devices = lease.need, {}
  for i, part in ipairs(lease.parts) do
    devices[i] = { device = part.uuid, memory_mib = part.memory_mib, compute_percent = part.compute_percent }
  end
  more.lease, more.holder, more.tenant, more.kind = lease.lease_id, lease.holder, need.tenant, need.kind or 'user'
  more.mode, more.devices, more.granted_ms = need.mode, devices, lease.granted_ms
  add_event(EVENTS, kind, lease.lease_id, cjson.encode(more))
end
-- A lease ends. Where its processes may still be on the device (it was active, and its holder did not say that it is off)
-- its parts go on counting as left. `how`: for its usage records, where the state does not say it.
local function end_lease(lease, state, why, clean, half_life, how)
  local id, exclusive = lease.lease_id, lease.need.mode == 'exclusive'
  meter(lease, how or state)
  lease_event('lease.ended', lease, { ended = how or state, why = why })
  for _, part in ipairs(lease.parts) do
    if lease.state == 'active' and not clean then
      -- The token makes the name unique: the same request may be granted, and end, there again.
      redis.call('HSET', LEFT, id .. ' ' .. part.uuid .. ' ' .. whole(part.token), cjson.encode({ v = 1, lease_id = id,
        uuid = part.uuid, memory_mib = part.memory_mib, compute_percent = part.compute_percent, exclusive = exclusive,
        pids = lease.pids or {}, since_ms = now, why = why }))
      count(part.uuid .. ':left', 1)
    else
      take(part, exclusive, -1)
    end
  end
  redis.call('HDEL', LEASES, id)
  redis.call('ZREM', DEADLINES, id)
  redis.call('ZREM', YIELDS, id)
  redis.call('SET', ENDED .. ':' .. id, state .. (why ~= '' and ': ' .. why or ''), 'EX', ENDED_S)
  settle(lease, half_life)
  changed()
end
-- A left part ceases to count.
local function free_left(name, left)
  redis.call('HDEL', LEFT, name)
  count(left.uuid .. ':left', -1)
  take(left, left.exclusive, -1)
  redis.call('SADD', FREED, left.uuid)
  changed()
end
