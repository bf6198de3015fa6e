-- Makes a batch that cannot be processed a dead letter, with its payload.
-- KEYS batch, due, counts, work, dead, in_flight, totals of each of its workloads
-- ARGV the struct DeadLetterArgs (ledger/arguments.py) as msgpack
-- returns 1, or 0 when the claim is no longer ours
-- invariant: accepted = stored + in flight + dead + discarded, in physical lines; dead batches block nobody.
--            Their payloads are counted, so that ledger/accept.lua can bound them.
local a = cmsgpack.unpack(ARGV[1])
local batch = fields(KEYS[1])
if not holds(batch, a.seq) then return 0 end
local now = now_ms()
redis.call('HSET', KEYS[1], 'state', 'dead', 'owner', '', 'deadline', 0, 'error', a.reason, 'dead_ms', now, 'died_in', batch.state,
  'dead_bytes', batch.bytes, 'first_line', a.first_line)
redis.call('ZREM', KEYS[2], a.batch_id)
redis.call('ZREM', KEYS[6], a.batch_id)
redis.call('ZADD', KEYS[5], now, a.batch_id)
redis.call('HINCRBY', KEYS[3], 'stage:' .. batch.state, -1)
redis.call('HINCRBY', KEYS[3], 'batches', -1)
redis.call('HINCRBY', KEYS[3], 'bytes', 0 - tonumber(batch.bytes))
redis.call('HINCRBY', KEYS[3], 'dead_bytes', batch.bytes)
if batch.kind ~= 'rescore' then
  for i, lines in ipairs(a.shares) do redis.call('HINCRBY', KEYS[6 + i], 'dead', lines) end
end
redis.call('DEL', KEYS[4])
return 1
