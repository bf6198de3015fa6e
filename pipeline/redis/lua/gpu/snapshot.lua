-- Everything of the pool at one moment.
-- KEYS as in gpu/_gpu.lua
-- ARGV quarantine ms, entries to answer with at most (-1: none)
-- returns {now ms, quarantine ms, beats, deadlines, sums, reservation | '', recent needs, overdue waits,
--         {nodes, devices, leases, waiting, left}},
--         undecoded; the last one is empty where there are more entries: what goes through Lua takes ten times as long,
--         and nobody else is served meanwhile, so the caller reads those in one transaction with this script
-- invariant: only the quarantine of a Redis that is new or was restarted is written.
local closed, entries, all = quarantine(ARGV[1]), 0, {}
local large = { NODES, DEVICES, LEASES, WAITING, LEFT }
local most = tonumber(ARGV[2])
if most >= 0 then
  for _, key in ipairs(large) do entries = entries + redis.call('HLEN', key) end
end
if entries <= most then
  for i, key in ipairs(large) do all[i] = redis.call('HVALS', key) end
end
return { whole(now), whole(closed), redis.call('ZRANGE', BEATS, 0, -1, 'WITHSCORES'),
  redis.call('ZRANGE', DEADLINES, 0, -1, 'WITHSCORES'), redis.call('HGETALL', SUMS),
  redis.call('GET', RESERVATION) or '', redis.call('HGETALL', DEMAND),
  redis.call('ZRANGEBYSCORE', WAITING_UNTIL, '-inf', whole(now)), all }
