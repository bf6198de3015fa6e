-- Put a dead letter back to work, on an operator's word.
-- KEYS batch, due, counts, dead, in_flight, totals of each of its workloads
-- ARGV id, overdue ms, lines of each of these workloads
-- returns 1, or 0 when the batch is not dead
-- invariant: lines move from dead to in flight, never twice, and so do bytes: `dead_bytes` is what its burial counted.
local batch = fields(KEYS[1])
if batch.state ~= 'dead' then return 0 end
redis.call('HSET', KEYS[1], 'state', 'ingest', 'attempts', 0, 'not_before', 0, 'error', '')
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('ZADD', KEYS[2], now_ms() + tonumber(ARGV[2]), ARGV[1])
redis.call('ZADD', KEYS[5], in_flight_score(batch.kind, batch.backfill, batch.accepted_ms), ARGV[1])
redis.call('HINCRBY', KEYS[3], 'stage:ingest', 1)
redis.call('HINCRBY', KEYS[3], 'batches', 1)
redis.call('HINCRBY', KEYS[3], 'bytes', batch.bytes)
forget_dead_bytes(KEYS[3], KEYS[4], KEYS[1], batch)
if batch.kind ~= 'rescore' then
  for i = 3, #ARGV do redis.call('HINCRBY', KEYS[3 + i], 'dead', 0 - tonumber(ARGV[i])) end
end
return 1
