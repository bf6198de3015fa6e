-- An operator says that nothing of ended leases is on a device any more.
-- KEYS as in gpu/_gpu.lua
-- ARGV device
-- returns how many left parts were there
-- invariant: leases that live are not touched.
local cleared = 0
if taken(ARGV[1]).left == 0 then return 0 end
local flat = redis.call('HGETALL', LEFT)
for i = 1, #flat, 2 do
  local left = cjson.decode(flat[i + 1])
  if left.uuid == ARGV[1] then
    free_left(flat[i], left)
    cleared = cleared + 1
  end
end
return cleared
