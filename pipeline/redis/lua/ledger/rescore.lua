-- A model has arrived: send a batch that was stored while warming through the path again.
-- KEYS batch, due, counts, warming, in_flight
-- ARGV id, overdue ms
-- returns 1, or 0 when the batch is not waiting for a model
-- invariant: the batch stays counted as stored; its rows are read back from the sink and replaced. It waits behind fresh
--            ones: somebody has its lines already.
local removed = redis.call('ZREM', KEYS[4], ARGV[1])
local batch = fields(KEYS[1])
if removed == 0 or batch.state ~= 'done' then return 0 end
redis.call('HSET', KEYS[1], 'state', 'ingest', 'kind', 'rescore', 'backfill', 1, 'attempts', 0,
  'not_before', 0, 'bytes', 0)
redis.call('ZADD', KEYS[2], now_ms() + tonumber(ARGV[2]), ARGV[1])
redis.call('ZADD', KEYS[5], in_flight_score('rescore', '1', batch.accepted_ms), ARGV[1])
redis.call('HINCRBY', KEYS[3], 'stage:ingest', 1)
redis.call('HINCRBY', KEYS[3], 'batches', 1)
return 1
