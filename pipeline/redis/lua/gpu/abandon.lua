-- A need is taken back.
-- KEYS as in gpu/_gpu.lua
-- ARGV the struct AbandonArgs (gpu/leasing/arguments.py) as msgpack
-- returns 1 when something was taken back, else 0
-- invariant: only the holder's own; a lease that was granted meanwhile is given back unless it has begun.
local a = cmsgpack.unpack(ARGV[1])
local id, done = a.request_id, 0
local known = redis.call('HGET', WAITING, id)
if known and cjson.decode(known).holder == a.holder then
  forget_wait(id)
  done = 1
end
local lease = lease_of(id)
if lease and lease.holder == a.holder and lease.state == 'granted' then
  end_lease(lease, 'released', '', true, a.half_life_s)
  done = 1
end
return done
