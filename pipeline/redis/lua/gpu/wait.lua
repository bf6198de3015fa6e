-- A need begins to wait, or goes on waiting; or it has its lease already.
-- KEYS as in gpu/_gpu.lua
-- ARGV the struct WaitArgs (gpu/leasing/arguments.py) as msgpack
-- returns {'waiting'} | {'granted', lease, deadline ms} | {'other', holder}
-- invariant: one request is one wait or one lease, of one holder. Whoever asks for something else waits from now on; a
--            lease stays what was granted, but lives on for the TTL that is asked for now.
local a = cmsgpack.unpack(ARGV[1])
local id = a.request_id
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
-- The times stand in front of the text, so that the rest compares as it is.
local since, rest = string.match(known or '', '^{"since_ms":(%d+),"until_ms":%d+,(.*)$')
local until_ms = whole(now + a.remember_ms)
if rest ~= string.sub(a.request, 2) then
  since, rest = whole(now), string.sub(a.request, 2)
  changed()
end
redis.call('HSET', WAITING, id, '{"since_ms":' .. since .. ',"until_ms":' .. until_ms .. ',' .. rest)
redis.call('ZADD', WAITING_UNTIL, until_ms, id)
return { 'waiting' }
