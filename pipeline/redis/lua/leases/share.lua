-- Shares resources of one source among its readers: renews what a reader holds, gives it what is free, up to its part.
-- KEYS leases (hash resource -> JSON), readers (zset holder -> deadline), tokens
-- ARGV the struct PartitionLeasesArgs (redis/partition_leases.py) as msgpack
-- returns a list of resource, token, resource, token ... that the reader holds from now on
-- invariant: one holder of a resource at a time; tokens only grow. A part is the number of resources by that of live readers,
--            rounded up. What is above it is given back, the last ones first, so a new reader gets its part within a beat.
local a = cmsgpack.unpack(ARGV[1])
local LEASES, READERS, TOKENS = KEYS[1], KEYS[2], KEYS[3]
local now = now_ms()
redis.call('ZREMRANGEBYSCORE', READERS, '-inf', now)
if a.leaves then redis.call('ZREM', READERS, a.holder) else redis.call('ZADD', READERS, now + a.ttl_ms, a.holder) end
local part = a.leaves and 0 or math.ceil(#a.resources / redis.call('ZCARD', READERS))
local wanted, mine, free = {}, {}, {}
for _, resource in ipairs(a.resources) do wanted[resource] = true end
local flat, leases = redis.call('HGETALL', LEASES), {}
for i = 1, #flat, 2 do
  local lease = cjson.decode(flat[i + 1])
  if lease.deadline <= now or (lease.holder == a.holder and not wanted[flat[i]]) then
    redis.call('HDEL', LEASES, flat[i])
  else
    leases[flat[i]] = lease
  end
end
for _, resource in ipairs(a.resources) do
  local lease = leases[resource]
  if not lease then free[#free + 1] = resource elseif lease.holder == a.holder then mine[#mine + 1] = resource end
end
while #mine > part do redis.call('HDEL', LEASES, table.remove(mine)) end
local held = {}
local function hold(resource, token)
  redis.call('HSET', LEASES, resource, cjson.encode({ holder = a.holder, token = token, deadline = now + a.ttl_ms }))
  held[#held + 1] = resource
  held[#held + 1] = token
end
for _, resource in ipairs(mine) do hold(resource, leases[resource].token) end
for _, resource in ipairs(free) do
  if #held / 2 >= part then break end
  hold(resource, redis.call('HINCRBY', TOKENS, a.source, 1))
end
redis.call('PEXPIRE', LEASES, 10 * a.ttl_ms)
redis.call('PEXPIRE', READERS, 10 * a.ttl_ms)
return held
