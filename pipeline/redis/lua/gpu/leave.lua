-- An agent ends and says so: its node goes, with what it has, and another agent may speak for it at once.
-- KEYS as in gpu/_gpu.lua
-- ARGV node, agent, node ttl ms
-- returns 1, or 0 when another agent speaks for the node
-- invariant: leases there live on until they are given back or fenced, as with an agent that died. What they, or left
--            parts, are on stays until nothing is on it any more (gpu/sweep.lua).
local text = redis.call('HGET', NODES, ARGV[1])
local node = text and cjson.decode(text)
if not node or node.agent ~= ARGV[2] then return 0 end
local kept = {}
for _, uuid in ipairs(node.uuids or {}) do
  local device = redis.call('HGET', DEVICES, uuid)
  device = device and cjson.decode(device)
  if device and device.node == ARGV[1] then
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
  redis.call('HDEL', NODES, ARGV[1])
  redis.call('ZREM', BEATS, ARGV[1])
  return 1
end
node.agent, node.left, node.uuids = '', true, kept
redis.call('HSET', NODES, ARGV[1], cjson.encode(node))
local beat = tonumber(redis.call('ZSCORE', BEATS, ARGV[1]) or 0)
redis.call('ZADD', BEATS, whole(math.min(beat, now - tonumber(ARGV[3]) - 1)), ARGV[1])
return 1
