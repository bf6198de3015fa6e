-- One agent says what its node has.
-- KEYS as in gpu/_gpu.lua
-- ARGV the struct ReportArgs (gpu/leasing/arguments.py) as msgpack
-- returns {''} | {'agent', who speaks for the node} | {'device', uuid, node that has it}
-- invariant: one agent speaks for a node and one node for a device while they live. Its clock is shown, never compared.
--            A left part is free only by what was seen after it was left: a report is looked at in full only when the
--            one before it, of the same agent, came later than that, because this one was gathered after that one.
local a = cmsgpack.unpack(ARGV[1])
local name, agent, ttl = a.node, a.agent, a.node_ttl_ms
local text = redis.call('HGET', NODES, name)
local node = text and cjson.decode(text) or { v = 1, name = name, agent = '', uuids = {} }
local alive = beating(name, ttl)
if node.agent ~= agent and node.agent ~= '' and alive then return { 'agent', node.agent } end
local before = node.agent == agent and node.reported_ms or 0
if before > now then before = 0 end  -- the clock was set back: that report tells nothing of the time since

local devices, old, seen, uuids = {}, {}, {}, {}
for _, said in ipairs(a.devices) do
  local device = cjson.decode(said)
  local known = redis.call('HGET', DEVICES, device.uuid)
  known = known and cjson.decode(known)
  if known and known.node ~= name and beating(known.node, ttl) then return { 'device', device.uuid, known.node } end
  if not seen[device.uuid] then uuids[#uuids + 1] = device.uuid end
  devices[device.uuid], old[device.uuid], seen[device.uuid] = device, known, said
end

-- Is the part of an ended lease off the device?
local leases
local function gone(left, device)
  if device.processes == cjson.null or left.since_ms >= before then return false end
  local there = {}
  for _, process in ipairs(device.processes) do there[process.pid] = true end
  if #left.pids > 0 then
    for _, pid in ipairs(left.pids) do
      if there[pid] then return false end
    end
    return true
  end
  -- Nobody told its processes: any that no lease explains may be one of them.
  if next(there) == nil then return true end
  leases = leases or redis.call('HVALS', LEASES)
  for _, other in ipairs(leases) do
    if string.find(other, left.uuid, 1, true) then
      for _, pid in ipairs(cjson.decode(other).pids or {}) do there[pid] = nil end
    end
  end
  return next(there) == nil
end

local some_left = false
for _, uuid in ipairs(uuids) do
  local device, known = devices[uuid], old[uuid]
  redis.call('HSET', DEVICES, uuid, seen[uuid])
  if not known or known.node ~= name or known.why ~= device.why or known.schedulable_mib ~= device.schedulable_mib
      or known.total_mib ~= device.total_mib or known.parent ~= device.parent or known.index ~= device.index then
    changed()
  end
  some_left = some_left or taken(uuid).left > 0
end
local lefts = some_left and redis.call('HGETALL', LEFT) or {}
for i = 1, #lefts, 2 do
  local left = cjson.decode(lefts[i + 1])
  if devices[left.uuid] then
    if left.since_ms > now then  -- the clock was set back
      left.since_ms = now
      redis.call('HSET', LEFT, lefts[i], cjson.encode(left))
    elseif gone(left, devices[left.uuid]) then
      free_left(lefts[i], left)
    end
  end
end

-- Devices that were there before and are not any more.
for _, uuid in ipairs(node.uuids or {}) do
  local known = not seen[uuid] and redis.call('HGET', DEVICES, uuid)
  known = known and cjson.decode(known)
  if known and known.node == name then
    if nothing_on(uuid) then
      redis.call('HDEL', DEVICES, uuid)
      changed()
    else
      uuids[#uuids + 1] = uuid
      if known.why ~= 'its driver does not show it any more' then
        known.why = 'its driver does not show it any more'
        redis.call('HSET', DEVICES, uuid, cjson.encode(known))
        changed()
      end
    end
  end
end
redis.call('HSET', NODES, name, cjson.encode({ v = 1, name = name, agent = agent, driver = a.driver,
  clock_ahead_ms = a.clock_ms - now, cpu_milli = a.cpu_milli, memory_mib = a.memory_mib, uuids = uuids, reported_ms = now }))
redis.call('ZADD', BEATS, whole(now), name)
if not alive or node.cpu_milli ~= a.cpu_milli or node.memory_mib ~= a.memory_mib then changed() end
return { '' }
