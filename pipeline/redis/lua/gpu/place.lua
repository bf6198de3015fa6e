-- Which models are on which devices (gpu/placement.py). Every call first drops what no living lease covers.
-- KEYS models, deadlines of the pool's leases, devices of the pool
-- ARGV the struct PlaceArgs (gpu/placement.py) as msgpack
-- returns list: {now ms, entry, entry, ...}; claim: {'claimed', entry} | {'held', entry} | {'full'} | {'lost'}
--         touch, ready, unloading, drop: 1, or 0 when the entry is not (any more) that claim's, or not in a state for it
-- invariant: one entry per device and model, and at most `replicas` of a model in the pool that load or are ready; the
--            models of one lease on a device never exceed its room there, and those of all leases with CUDA's context of
--            each never exceed what the device may lend, whatever the leases say; an entry ends with its lease or, while it is
--            loaded, with its time to load, whatever becomes of the process.
local a = cmsgpack.unpack(ARGV[1])
local now, verb, name = now_ms(), a.verb, a.field
local entries = {}
for field, text in pairs(fields(KEYS[1])) do
  local entry = cjson.decode(text)
  local deadline = tonumber(redis.call('ZSCORE', KEYS[2], entry.lease_id) or '0')
  if deadline <= now or (entry.state == 'loading' and entry.until_ms <= now) then
    redis.call('HDEL', KEYS[1], field)
  else
    entries[field] = { entry = entry, text = text }
  end
end
local function put(entry)
  local text = cjson.encode(entry)
  redis.call('HSET', KEYS[1], name, text)
  return text
end
if verb == 'list' then
  local answer = { now }
  for _, found in pairs(entries) do answer[#answer + 1] = found.text end
  return answer
end
local found = entries[name]
if verb == 'claim' then
  if found then return { 'held', found.text } end
  local entry = cjson.decode(a.entry)
  if tonumber(redis.call('ZSCORE', KEYS[2], entry.lease_id) or '0') <= now then return { 'lost' } end
  local sum, copies = a.memory_mib, 0
  local on_device, leases = a.memory_mib + a.context_mib, { [entry.lease_id] = true }
  for _, other in pairs(entries) do
    if other.entry.tenant == entry.tenant and other.entry.name == entry.name and other.entry.state ~= 'unloading' then
      copies = copies + 1
      if copies >= a.replicas then return { 'held', other.text } end
    end
    if other.entry.lease_id == entry.lease_id and other.entry.uuid == entry.uuid then
      sum = sum + other.entry.memory_mib
    end
    if other.entry.uuid == entry.uuid then
      on_device = on_device + other.entry.memory_mib
      if not leases[other.entry.lease_id] then
        leases[other.entry.lease_id], on_device = true, on_device + a.context_mib
      end
    end
  end
  if sum > a.room_mib then return { 'full' } end
  local device = redis.call('HGET', KEYS[3], entry.uuid)
  if device and on_device > cjson.decode(device).schedulable_mib then return { 'full' } end
  entry.state, entry.used_ms, entry.until_ms = 'loading', now, now + a.load_ms
  return { 'claimed', put(entry) }
end
if not found or found.entry.claim ~= a.claim then return 0 end
local entry = found.entry
if verb == 'drop' then
  redis.call('HDEL', KEYS[1], name)
  return 1
end
-- What each verb needs to find, and what it leaves behind.
local from = { touch = 'ready', ready = 'loading', unloading = 'ready' }
local to = { touch = 'ready', ready = 'ready', unloading = 'unloading' }
if entry.state ~= from[verb] then return 0 end
entry.state, entry.used_ms = to[verb], now
put(entry)
return 1
