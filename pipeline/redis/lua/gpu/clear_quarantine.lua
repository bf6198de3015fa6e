-- No earlier process can still hold or want anything: forget it all, and no quarantine is needed.
-- KEYS as in gpu/_gpu.lua
-- returns 1
-- invariant: nodes, devices, tokens and use stay, and each lease has its usage record; a new agent may speak for any node at once.
redis.call('HSET', REPLICATION, 'id', server_id(), 'until_ms', 0)
for _, text in ipairs(redis.call('HVALS', LEASES)) do
  local lease = cjson.decode(text)
  meter(lease, 'restart')
  lease_event('lease.ended', lease, { ended = 'restart', why = 'the stack began anew' })
end
redis.call('DEL', LEASES, DEADLINES, YIELDS, TAKEN, LEFT, WAITING, WAITING_UNTIL, RESERVATION, FREED, LINE)
local flat = redis.call('HGETALL', NODES)
for i = 1, #flat, 2 do
  local node = cjson.decode(flat[i + 1])
  node.agent = ''
  redis.call('HSET', NODES, flat[i], cjson.encode(node))
end
changed()
return 1
