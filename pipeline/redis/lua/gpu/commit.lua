-- Make a plan happen: grants, requests to yield, the reservation.
-- KEYS as in gpu/_gpu.lua
-- ARGV the struct CommitArgs (gpu/leasing/arguments.py) as msgpack
-- returns {'', lease, deadline ms, lease, deadline ms ...} | {'stale'} | {'quarantine', ms left} | {'unfit', why}
-- invariant: all of it or nothing. What counts on a device, leases and left parts, is never more than is schedulable;
--            an exclusive part stands alone; every part gets a token above all before it, on any device.
local a = cmsgpack.unpack(ARGV[1])
local LINE_MS = 2000
if tonumber(redis.call('HGET', SUMS, 'epoch') or '0') ~= a.epoch then return { 'stale' } end
local plan = cjson.decode(a.plan)
if #plan.grants > 0 then
  local closed = quarantine(a.lease_ttl_ms)
  if closed > 0 then return { 'quarantine', closed } end
end

-- First look whether everything fits; `sums` and `seen` run ahead of what is written.
local sums, devices, seen = {}, {}, {}
local function unfit(request, part)
  local uuid, need = part.uuid, request.need
  if not devices[uuid] then
    local text = redis.call('HGET', DEVICES, uuid)
    if not text then return uuid .. ' is not known' end
    devices[uuid], sums[uuid] = cjson.decode(text), taken(uuid)
  end
  local device, sum = devices[uuid], sums[uuid]
  if device.why ~= '' then return uuid .. ': ' .. device.why end
  if not beating(device.node, a.node_ttl_ms) then return uuid .. ': its node is silent' end
  if (need.node ~= '' and not string.find('|' .. need.node .. '|', '|' .. device.node .. '|', 1, true)) or (need.device ~= '' and need.device ~= uuid) then
    return uuid .. ' is not where the need wants to be'
  end
  local memory, compute = part.memory_mib, part.compute_percent
  if memory < 0 or compute < 0 or memory % 1 ~= 0 or compute % 1 ~= 0 then return uuid .. ': not a size' end
  if need.mode == 'exclusive' then
    if sum.shared > 0 or sum.exclusive > 0 then return uuid .. ' is not empty' end
    if memory < need.memory_mib or memory > device.schedulable_mib or compute > 100 then return uuid .. ' is too small' end
    sum.exclusive = 1
  else
    if sum.exclusive > 0 then return uuid .. ' is held alone' end
    if memory < need.memory_mib or compute < need.compute_percent then return uuid .. ': less than the need' end
    if sum.memory + memory > device.schedulable_mib then return uuid .. ' has too little memory left' end
    if sum.compute + compute > 100 then return uuid .. ' has too little compute left' end
    sum.shared = sum.shared + 1
  end
  sum.memory, sum.compute = sum.memory + memory, sum.compute + compute
end
local requests = {}
for i, grant in ipairs(plan.grants) do
  local id = grant.request_id
  local text = redis.call('HGET', WAITING, id)
  if not text or seen[id] then return { 'unfit', id .. ' does not wait' } end
  if tonumber(redis.call('ZSCORE', WAITING_UNTIL, id) or 0) <= now then return { 'unfit', id .. ' waits no more' } end
  if redis.call('HEXISTS', LEASES, id) == 1 then return { 'unfit', id .. ' has a lease' } end
  local request, places = cjson.decode(text), {}
  if #grant.parts ~= request.need.devices then return { 'unfit', id .. ' is not served whole' } end
  for _, part in ipairs(grant.parts) do
    local why = places[part.uuid] and part.uuid .. ' is named twice' or unfit(request, part)
    if why then return { 'unfit', id .. ': ' .. why } end
    places[part.uuid] = true
  end
  requests[i], seen[id] = request, true
end
local yielding = {}
for i, ask in ipairs(plan.yields) do
  yielding[i] = lease_of(ask.lease_id)
  if not yielding[i] then return { 'unfit', ask.lease_id .. ' has ended' } end
end

-- Then write.
local answer = { '' }
for i, grant in ipairs(plan.grants) do
  local request, id = requests[i], grant.request_id
  -- One count for all devices: the token alone then tells a lease from one that had its name before, elsewhere.
  -- It begins at the clock: after Redis lost its data no token of before comes again.
  redis.call('HSETNX', SUMS, 'token', whole(now))
  local token, facts = redis.call('HINCRBY', SUMS, 'token', 1), {}
  for j, part in ipairs(grant.parts) do
    part.token, facts[j] = token, about(request.need, part, devices[part.uuid])
    take(part, request.need.mode == 'exclusive', 1)
  end
  local lease = { v = 1, lease_id = id, holder = request.holder, need = request.need, parts = grant.parts,
    state = 'granted', granted_ms = now, ttl_ms = request.ttl_ms, share = grant.share, prepaid = grant.prepaid, about = facts }
  local text = cjson.encode(lease)
  redis.call('HSET', LEASES, id, text)
  local deadline = whole(now + math.min(request.ttl_ms, a.lease_ttl_ms))
  redis.call('ZADD', DEADLINES, deadline, id)
  redis.call('DEL', ENDED .. ':' .. id)
  charge(request.need.tenant, tonumber(grant.prepaid), a.half_life_s)
  forget_wait(id)
  tell(id, deadline .. ' ' .. text)
  lease_event('lease.granted', lease, {})
  answer[#answer + 1], answer[#answer + 2] = text, deadline
end
for i, ask in ipairs(plan.yields) do
  local lease = yielding[i]
  -- Never later than what was said before.
  if type(lease.yield_by_ms) ~= 'number' or ask.by_ms < lease.yield_by_ms then
    lease.yield_by_ms, lease.yield_why = ask.by_ms, ask.why
    redis.call('HSET', LEASES, lease.lease_id, cjson.encode(lease))
    redis.call('ZADD', YIELDS, whole(ask.by_ms), lease.lease_id)
    lease_event('lease.yield', lease, { by_ms = ask.by_ms, why = ask.why })
    changed()
  end
end
-- The start of a reservation moves with the clock: that alone makes no plan stale.
local function place(text) local r = cjson.decode(text) return r.request_id .. ' ' .. table.concat(r.uuids, ' ') end
local old, new = redis.call('GET', RESERVATION) or '', a.reservation
if new ~= '' and redis.call('HEXISTS', WAITING, cjson.decode(new).request_id) == 0 then new = '' end
if new == '' and old ~= '' then
  redis.call('DEL', RESERVATION)
  changed()
elseif new ~= old then
  redis.call('SET', RESERVATION, new)
  if old == '' or place(old) ~= place(new) then changed() end
end
-- The order of those that wait next, for gpu/release.lua. It serves while nothing else changes: each of them names the
-- epoch at which its turn is. It ends before a node that is heard of now can fall silent, and before the use of tenants
-- changes much.
redis.call('DEL', LINE)
if plan.line and #plan.line > 0 then
  local beat = redis.call('ZRANGEBYSCORE', BEATS, whole(now - a.node_ttl_ms), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  local keep_ms = math.min(LINE_MS, tonumber(beat[2] or 0) + a.node_ttl_ms - now)
  local texts, turns, id = redis.call('HMGET', WAITING, unpack(plan.line)), {}, server_id()
  local epoch = tonumber(redis.call('HGET', SUMS, 'epoch') or '0')
  for i, text in ipairs(texts) do
    if not text then break end
    turns[i] = string.format('%.0f %s %s', epoch + i - 1, id, text)
  end
  if #turns > 0 and keep_ms > 0 then
    redis.call('RPUSH', LINE, unpack(turns))
    redis.call('PEXPIRE', LINE, whole(keep_ms))
  end
end
return answer
