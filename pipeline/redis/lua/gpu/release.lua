-- Give a lease back, and hand it on where the next need in the line wants the same.
-- KEYS as in gpu/_gpu.lua
-- ARGV the struct ReleaseArgs (gpu/leasing/arguments.py) as msgpack
-- returns {1, or 0 when it was not theirs any more, how many needs wait for a plan}; 0 wait where the lease was handed on
-- invariant: nobody can release another holder's lease. One whose deadline has passed counts until it is swept, so its
--            holder may still say that it is off. What is handed on is what a plan would give: the line is as old as the
--            last change of the pool, its first need is the next in order, and it wants what the ended lease had. That
--            need gets the same parts, under a new token, in the same step: what counts on a device stays the same.
local a = cmsgpack.unpack(ARGV[1])
local lease = lease_of(a.lease_id)
if not lease then return { 0, redis.call('HLEN', WAITING) } end
if a.holder == '' then
  if whole(lease.parts[1].token) ~= a.tokens then return { 0, redis.call('HLEN', WAITING) } end
elseif lease.holder ~= a.holder or tokens_of(lease) ~= a.tokens then
  return { 0, redis.call('HLEN', WAITING) }
end
local WANTS = { 'mode', 'memory_mib', 'compute_percent', 'devices', 'node', 'device', 'device_kind', 'model', 'cpu_milli',
  'node_memory_mib', 'same_node' }
-- The next in the line, if it is its turn and it listens: its process lives.
local function successor()
  if a.holder == '' or not a.clean or type(lease.yield_by_ms) == 'number' then return end
  -- Its deadline was later than this when it was granted, and only grows.
  if now >= lease.granted_ms + math.min(lease.ttl_ms, a.lease_ttl_ms) and deadline_of(a.lease_id) <= now then return end
  local epoch, id, text = string.match(redis.call('LPOP', LINE) or '', '^(%d+) (%w+) (.*)$')
  if not epoch or id ~= server_id() then return end
  local request = cjson.decode(text)
  for _, name in ipairs(WANTS) do
    if request.need[name] ~= lease.need[name] then return end
  end
  local old, new = 'use:' .. lease.need.tenant, 'use:' .. request.need.tenant
  local field = metered_field(lease.need)
  local sums = redis.call('HMGET', SUMS, 'epoch', 'token', field, old, new)
  if sums[1] ~= epoch then return end
  return { request = request, token = tonumber(sums[2]) + 1, epoch = tonumber(epoch) + 1, field = field,
    metered = tonumber(sums[3] or 0), old = old, new = new, used = sums[4], uses = sums[5] }
end
-- Answers whether the next one has the lease now. Nothing is written before it is known to listen.
local function hand_on(next)
  local request, id, parts = next.request, next.request.request_id, {}
  for i, part in ipairs(lease.parts) do
    parts[i] = { uuid = part.uuid, memory_mib = part.memory_mib, compute_percent = part.compute_percent, token = next.token }
  end
  local after = { v = 1, lease_id = id, holder = request.holder, need = request.need, parts = parts, state = 'granted',
    granted_ms = now, ttl_ms = request.ttl_ms, share = lease.share, prepaid = lease.prepaid, about = lease.about }
  local text, deadline = cjson.encode(after), whole(now + math.min(request.ttl_ms, a.lease_ttl_ms))
  if tell(id, deadline .. ' ' .. text) == 0 then return false end
  local metered = next.metered + write_records(lease, now, 'released')
  lease_event('lease.ended', lease, { ended = 'released', why = '' })
  redis.call('HDEL', LEASES, a.lease_id)
  redis.call('ZREM', DEADLINES, a.lease_id)
  redis.call('HDEL', WAITING, id)  -- and from WAITING_UNTIL by gpu/sweep.lua
  redis.call('HSET', LEASES, id, text)
  redis.call('ZADD', DEADLINES, deadline, id)
  local used = charged(next.used, owed(lease, a.half_life_s), a.half_life_s)
  local uses = charged(next.old == next.new and used or next.uses, tonumber(lease.prepaid or 0), a.half_life_s)
  redis.call('HSET', SUMS, 'epoch', whole(next.epoch), 'token', whole(next.token), next.field, whole(metered),
    next.old, used, next.new, uses)
  lease_event('lease.granted', after, {})
  return true
end
local next = successor()
if next and hand_on(next) then return { 1, 0 } end
end_lease(lease, 'released', a.clean and '' or 'its holder did not say that it is off the device', a.clean, a.half_life_s)
return { 1, redis.call('HLEN', WAITING) }
