-- End what has run out.
-- KEYS as in gpu/_gpu.lua
-- ARGV the struct SweepArgs (gpu/leasing/arguments.py) as msgpack
-- returns {expired leases, revoked leases, fenced leases, freed devices, forgotten requests}
-- invariant: time is this clock alone. Processes of an active lease may live on, so its parts go on counting as left.
--            Where the clock was set back nobody lives longer for it than from now on: no deadline is later than one
--            TTL, no node was heard of later than now.
local a = cmsgpack.unpack(ARGV[1])
local RECORDS_MAX = 50000  -- 16 MiB; half a day of one end per second while nobody stores them
local AT_ONCE, SPENT_DAYS, SPENT_MAX = 500, 40, 2000  -- at once: no sweep keeps Redis from the others for long
local ttl, half_life = a.node_ttl_ms, a.half_life_s
local expired, revoked, fenced, forgotten = {}, {}, {}, {}
-- Few are so late: those with a TTL of their own.
local late = redis.call('ZREVRANGEBYSCORE', DEADLINES, '+inf', '(' .. whole(now + a.lease_ttl_ms), 'WITHSCORES', 'LIMIT',
  0, AT_ONCE)
for i = 1, #late, 2 do
  local lease = lease_of(late[i])
  if lease and tonumber(late[i + 1]) > now + lease.ttl_ms then
    redis.call('ZADD', DEADLINES, 'XX', whole(now + lease.ttl_ms), late[i])
  end
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', BEATS, '(' .. whole(now), '+inf')) do
  redis.call('ZADD', BEATS, 'XX', whole(now), name)
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', whole(now), 'LIMIT', 0, AT_ONCE)) do
  local lease = lease_of(id)
  if lease then
    end_lease(lease, 'expired', 'it was not renewed', false, half_life)
    expired[#expired + 1] = id
  else
    redis.call('ZREM', DEADLINES, id)
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', YIELDS, '-inf', whole(now), 'LIMIT', 0, AT_ONCE)) do
  local lease = lease_of(id)
  if lease then
    local why = lease.yield_why ~= '' and ' (' .. lease.yield_why .. ')' or ''
    end_lease(lease, 'revoked', 'it did not yield in time' .. why, false, half_life)
    revoked[#revoked + 1] = id
  else
    redis.call('ZREM', YIELDS, id)
  end
end

-- Nodes that are silent, and which of their devices live leases hold.
local silent, watched = redis.call('ZRANGEBYSCORE', BEATS, '-inf', '(' .. whole(now - ttl), 'WITHSCORES'), {}
for i = 1, #silent, 2 do
  local text = redis.call('HGET', NODES, silent[i])
  for _, uuid in ipairs(text and cjson.decode(text).uuids or {}) do
    local sums = taken(uuid)
    local device = sums.shared + sums.exclusive > sums.left and redis.call('HGET', DEVICES, uuid)
    if device and cjson.decode(device).node == silent[i] then
      watched[uuid] = { node = silent[i], beat = tonumber(silent[i + 1]) }
    end
  end
end
if next(watched) ~= nil then
  for _, text in ipairs(redis.call('HVALS', LEASES)) do
    local lease, why = cjson.decode(text), nil
    for _, part in ipairs(lease.parts) do
      local at = watched[part.uuid]
      if at and now - at.beat > ttl + lease.ttl_ms then
        why = string.format('node %s has been silent for %.0f s', at.node, (now - at.beat) / 1000)
      end
    end
    if why then
      end_lease(lease, 'revoked', why, false, half_life, 'node_lost')
      fenced[#fenced + 1] = lease.lease_id
    end
  end
end

local due = redis.call('ZRANGEBYSCORE', WAITING_UNTIL, '-inf', whole(now), 'LIMIT', 0, AT_ONCE)
if #due > 0 then
  redis.call('ZREM', WAITING_UNTIL, unpack(due))
  for i, text in ipairs(redis.call('HMGET', WAITING, unpack(due))) do
    if text then  -- not one that gpu/release.lua has served
      forget_wait(due[i])
      tell(due[i])
      forgotten[#forgotten + 1] = due[i]
    end
  end
end

-- A node whose agent said that it ends, or that nobody heard of for a day, goes with those of its devices that nothing is on.
for i = 1, #silent, 2 do
  local text, kept = redis.call('HGET', NODES, silent[i]), 0
  local node = text and cjson.decode(text) or {}
  if node.left or now - tonumber(silent[i + 1]) > DAY then
    for _, uuid in ipairs(node.uuids or {}) do
      local device = redis.call('HGET', DEVICES, uuid)
      if device and cjson.decode(device).node == silent[i] then
        if nothing_on(uuid) then
          redis.call('HDEL', DEVICES, uuid)
          changed()
        else
          kept = kept + 1
        end
      end
    end
    if kept == 0 then
      redis.call('HDEL', NODES, silent[i])
      redis.call('ZREM', BEATS, silent[i])
      changed()
    end
  end
end
-- Nobody stores the records: the oldest go, and are counted.
local lost = redis.call('XTRIM', RECORDS, 'MAXLEN', RECORDS_MAX)
if lost > 0 then redis.call('HINCRBY', SUMS, 'lost', lost) end
-- Days that no budget counts any more.
if redis.call('HLEN', SPENT) > SPENT_MAX then
  for _, field in ipairs(redis.call('HKEYS', SPENT)) do
    if tonumber(string.match(field, '^%d+')) < math.floor(now / DAY) - SPENT_DAYS then redis.call('HDEL', SPENT, field) end
  end
end
local freed = redis.call('SMEMBERS', FREED)
redis.call('DEL', FREED)
return { expired, revoked, fenced, freed, forgotten }
