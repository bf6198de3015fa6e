-- A need begins to wait, or goes on waiting; or it has its lease already.
-- KEYS as in gpu/_gpu.lua
-- ARGV the struct WaitArgs (gpu/leasing/arguments.py) as msgpack
-- returns {'waiting'} | {'granted', lease, deadline ms} | {'other', holder}
-- invariant: one request is one wait or one lease, of one holder. Whoever asks for something else waits from now on; a
--            lease stays what was granted, but lives on for the TTL that is asked for now.
local a = cmsgpack.unpack(ARGV[1])
local id = a.request_id
-- Counts a new need by its form. A full window joins the distribution that plans use, where older needs then count half
-- (gpu/policy/demand.py keeps the same rule). The field '' of both hashes is the sum of the others.
local FIRST, WINDOW, HALVED, FORMS = 32, 512, 2048, 256
local function count_demand(need)
  local form = table.concat({ need.mode, whole(need.memory_mib), whole(need.compute_percent), whole(need.devices),
    need.device_kind or 'any', whole(need.cpu_milli or 0), whole(need.node_memory_mib or 0),
    need.same_node and 1 or 0, need.model or '' }, '|')
  if redis.call('HINCRBY', DEMAND_WINDOW, form, 1) == 1 and redis.call('HLEN', DEMAND_WINDOW) > FORMS then
    redis.call('HDEL', DEMAND_WINDOW, form)
    return
  end
  local known = tonumber(redis.call('HGET', DEMAND, '') or 0)
  if redis.call('HINCRBY', DEMAND_WINDOW, '', 1) < math.max(FIRST, math.min(known, WINDOW)) then return end
  local counts, sum = {}, 0
  for _, key in ipairs({ DEMAND, DEMAND_WINDOW }) do
    local flat = redis.call('HGETALL', key)
    local old = key == DEMAND and (known >= HALVED or #flat > 4 * FORMS)
    for i = 1, #flat, 2 do
      local count = tonumber(flat[i + 1])
      if old then count = math.floor(count / 2) end
      if flat[i] ~= '' and count > 0 then counts[flat[i]] = (counts[flat[i]] or 0) + count end
    end
  end
  redis.call('DEL', DEMAND, DEMAND_WINDOW)
  for text, count in pairs(counts) do
    redis.call('HSET', DEMAND, text, count)
    sum = sum + count
  end
  redis.call('HSET', DEMAND, '', sum)
end
local lease = lease_of(id)
if lease then
  if lease.holder ~= a.holder then return { 'other', lease.holder } end
  if deadline_of(id) > now then
    local ttl = cjson.decode(a.request).ttl_ms
    if ttl ~= lease.ttl_ms then
      lease.ttl_ms = ttl
      redis.call('HSET', LEASES, id, cjson.encode(lease))
    end
    redis.call('ZADD', DEADLINES, 'XX', whole(now + ttl), id)
    return { 'granted', redis.call('HGET', LEASES, id), whole(now + ttl) }
  end
  end_lease(lease, 'expired', 'it was not renewed', false, a.half_life_s)
end
local known = redis.call('HGET', WAITING, id)
if known then
  local holder = cjson.decode(known).holder
  if holder ~= a.holder then return { 'other', holder } end
end
-- The time stands in front of the text, so that the rest compares as it is.
local since, rest = string.match(known or '', '^{"since_ms":(%d+),(.*)$')
if rest ~= string.sub(a.request, 2) then
  since, rest = whole(now), string.sub(a.request, 2)
  count_demand(cjson.decode(a.request).need)
  changed()
end
redis.call('HSET', WAITING, id, '{"since_ms":' .. since .. ',' .. rest)
redis.call('ZADD', WAITING_UNTIL, whole(now + a.remember_ms), id)
return { 'waiting' }
