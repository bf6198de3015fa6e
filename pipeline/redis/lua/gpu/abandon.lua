-- A need is taken back.
-- KEYS as in gpu/_gpu.lua
-- ARGV request, holder, half-life s
-- returns 1 when something was taken back, else 0
-- invariant: only the holder's own; a lease that was granted meanwhile is given back unless it has begun.
local id, done = ARGV[1], 0
local known = redis.call('HGET', WAITING, id)
if known and cjson.decode(known).holder == ARGV[2] then
  forget_wait(id)
  done = 1
end
local lease = lease_of(id)
if lease and lease.holder == ARGV[2] and lease.state == 'granted' then
  end_lease(lease, 'released', '', true, ARGV[3])
  done = 1
end
if done == 1 then redis.call('DEL', TOLD .. ':' .. id) end
return done
