-- Shared by the scripts of the GPU pool, behind _prelude.lua. All scripts of gpu/leasing/pool_ledger.py get the same KEYS in this
-- order. ENDED is the first part of the names of keys, TOLD of channels, one per request; ENDED carries the hash tag of the
-- others. SUMS has `epoch` (changes of the pool), `token` (the newest one), `use:<tenant>`, `ms:<kind>:<tenant>` and `lost`:
-- one hash, so that one command reads or writes several of them.
local NODES, BEATS, DEVICES, LEASES, DEADLINES, YIELDS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local TAKEN, LEFT, WAITING, WAITING_UNTIL, SUMS = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local RESERVATION, FREED, RECORDS, DEMAND, DEMAND_WINDOW = KEYS[12], KEYS[13], KEYS[14], KEYS[15], KEYS[16]
local LINE, SPENT, REPLICATION, TOLD, ENDED, EVENTS = KEYS[17], KEYS[18], KEYS[19], KEYS[20], KEYS[21], KEYS[22]
local ENDED_S, DAY = 600, 86400000
local now = now_ms()
local function whole(n) return string.format('%.0f', n) end
-- Something that planning depends on is different: plans made before are stale.
local function changed() redis.call('HINCRBY', SUMS, 'epoch', 1) end
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
-- Wakes whoever waits for the request, and returns how many listen. `news`: the lease that it got, behind its deadline.
-- Whoever does not listen yet asks once more when it does (gpu/leasing/waiting.py).
local function tell(id, news) return redis.call('PUBLISH', TOLD .. ':' .. id, news or '1') end
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
local function server_id() return string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)') end
-- How long nothing is granted: one TTL after Redis was restarted, failed over or is new, as in leases/grant.lua (same key).
local function quarantine(ttl)
  local id = server_id()
  local known = redis.call('HMGET', REPLICATION, 'id', 'until_ms')
  if known[1] ~= id then
    -- A Redis whose disk is full refuses this, and answers whoever only asks; a grant fails at its own writes.
    redis.pcall('HSET', REPLICATION, 'id', id, 'until_ms', whole(now + tonumber(ttl)))
    return tonumber(ttl)
  end
  return math.max(0, math.min(tonumber(ttl), tonumber(known[2] or 0) - now))  -- a clock set back must not lengthen it
end
-- Dominant-share-seconds of a tenant halve every half-life; nothing decays when the clock went backward.
-- `text`: the use as it stands in SUMS.
local function charged(text, amount, half_life)
  local value, at = string.match(text or '', '^(.-):(%d+)$')
  value, at = tonumber(value or 0), tonumber(at or now)
  if at < now then value, at = value * 2 ^ (-(now - at) / 1000 / half_life), now end
  return string.format('%.17g:%.0f', math.max(0, value + amount), at)
end
local function charge(tenant, amount, half_life)
  local field = 'use:' .. tenant
  redis.call('HSET', SUMS, field, charged(redis.call('HGET', SUMS, field), amount, half_life))
end
-- What the lease used in truth, by the closed form of a constant rate that decays, in place of what was prepaid.
local function owed(lease, half_life)
  local half, share, prepaid = tonumber(half_life), tonumber(lease.share or 0), tonumber(lease.prepaid or 0)
  local rest = 2 ^ (-math.max(0, now - lease.granted_ms) / 1000 / half)
  return share * half / math.log(2) * (1 - rest) - prepaid * rest
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
-- What the usage record of a part says of its device. `share`: of the device, the larger of memory and compute.
local function about(need, part, device)
  local size, share = tonumber(device.schedulable_mib or 0), 1
  if need.mode ~= 'exclusive' then
    share = math.min(1, math.max(part.compute_percent / 100, size > 0 and part.memory_mib / size or 0))
  end
  return { node = device.node, name = device.name or '', share = string.format('%.6f', share) }
end
-- The time of a part, in milliseconds of a whole device, for the days of UTC in which it was held (gpu/leasing/accounts.py).
local function spend(tenant, from, ended, share)
  for day = math.floor(from / DAY), math.floor(math.max(from, ended - 1) / DAY) do
    local ms = math.min(ended, (day + 1) * DAY) - math.max(from, day * DAY)
    if ms > 0 then redis.call('HINCRBY', SPENT, whole(day) .. ' ' .. tenant, math.floor(ms * share + 0.5)) end
  end
end
-- The usage record of each part of a lease that ended at `ended`. Returns the milliseconds of whole devices. gpu/sweep.lua
-- bounds the stream.
local function write_records(lease, ended, how)
  local need, sum = lease.need, 0
  for i, part in ipairs(lease.parts) do
    local known = lease.about and lease.about[i]
    if not known then
      local text = redis.call('HGET', DEVICES, part.uuid)
      known = about(need, part, text and cjson.decode(text) or {})
    end
    redis.call('XADD', RECORDS, '*', 'record', cjson.encode({ v = 1, lease_id = lease.lease_id,
      token = part.token, holder = lease.holder, tenant = need.tenant, kind = need.kind or 'user', mode = need.mode,
      node = known.node or lease.host or '', device = part.uuid, device_name = known.name,
      memory_mib = part.memory_mib, compute_percent = part.compute_percent, share = known.share,
      granted_ms = lease.granted_ms, ended_ms = ended, ended = how }))
    spend(need.tenant, lease.granted_ms, ended, tonumber(known.share))
    sum = sum + math.floor((ended - lease.granted_ms) * tonumber(known.share) + 0.5)
  end
  return sum
end
local function metered_field(need) return 'ms:' .. (need.kind or 'user') .. ':' .. need.tenant end
-- The records of a lease that ends now, and the sums that Prometheus reads. A lease ends at its deadline at the latest,
-- however late that is found out.
local function meter(lease, how)
  local deadline = deadline_of(lease.lease_id)
  local ended = math.max(lease.granted_ms, deadline > 0 and math.min(deadline, now) or now)
  redis.call('HINCRBY', SUMS, metered_field(lease.need), write_records(lease, ended, how))
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
  charge(lease.need.tenant, owed(lease, half_life), half_life)
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
