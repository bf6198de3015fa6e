-- An agent ends and says so: its node goes, with what it has, and another agent may speak for it at once.
-- KEYS as in gpu/_gpu.lua
-- ARGV the struct LeaveArgs (gpu/leasing/arguments.py) as msgpack
-- returns 1, or 0 when another agent speaks for the node
-- invariant: leases there live on until they are given back or fenced, as with an agent that died. What they, or left
--            parts, are on stays until nothing is on it any more (gpu/sweep.lua).
local a = cmsgpack.unpack(ARGV[1])
local text = redis.call('HGET', NODES, a.node)
local node = text and cjson.decode(text)
if not node or node.agent ~= a.agent then return 0 end
local kept = {}
for _, uuid in ipairs(node.uuids or {}) do
  local device = redis.call('HGET', DEVICES, uuid)
  device = device and cjson.decode(device)
  if device and device.node == a.node then
    if nothing_on(uuid) then
      redis.call('HDEL', DEVICES, uuid)
    else
      device.why, kept[#kept + 1] = 'its agent has ended', uuid
      redis.call('HSET', DEVICES, uuid, cjson.encode(device))
    end
  end
end
changed()
if #kept == 0 then
  redis.call('HDEL', NODES, a.node)
  redis.call('ZREM', BEATS, a.node)
  return 1
end
node.agent, node.left, node.uuids = '', true, kept
redis.call('HSET', NODES, a.node, cjson.encode(node))
local beat = tonumber(redis.call('ZSCORE', BEATS, a.node) or 0)
redis.call('ZADD', BEATS, whole(math.min(beat, now - a.node_ttl_ms - 1)), a.node)
return 1
