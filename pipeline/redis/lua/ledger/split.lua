-- Replace a batch that keeps failing by its two halves, so that the bad lines end up alone.
-- KEYS batch, due, counts, payload, work, left batch, left payload, right batch, right payload
-- ARGV id, seq, keep s, overdue ms, max attempts,
--      left id, left payload, left hash, left lines, left records, right id, right payload, right hash, right lines, right records, meta (JSON) of both
-- returns 1, or 0 when the claim is no longer ours
-- invariant: the halves hold exactly the lines of the parent; a half with more than one record gets one attempt
--            before it is split again, a single record gets all of them.
local batch = fields(KEYS[1])
if not holds(batch, ARGV[2]) then return 0 end
local now = now_ms()
keep_slim(KEYS[1], batch, 'split', ARGV[3])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HINCRBY', KEYS[3], 'stage:' .. batch.state, -1)
redis.call('HINCRBY', KEYS[3], 'batches', 1)
redis.call('HINCRBY', KEYS[3], 'bytes', #ARGV[7] + #ARGV[12] - tonumber(batch.bytes))
redis.call('DEL', KEYS[4], KEYS[5])
for half = 0, 1 do
  local at = 6 + half * 5
  local attempts = 0
  if tonumber(ARGV[at + 4]) > 1 then attempts = tonumber(ARGV[5]) - 1 end
  -- A parent that was forgotten and accepted anew is split into the same ids: what stands there still would expire.
  redis.call('DEL', KEYS[6 + half * 2])
  redis.call('SET', KEYS[7 + half * 2], ARGV[at + 1])
  redis.call('HSET', KEYS[6 + half * 2], 'state', 'ingest', 'hash', ARGV[at + 2], 'lines', ARGV[at + 3],
    'records', ARGV[at + 4], 'workload', batch.workload, 'meta', ARGV[16], 'bytes', #ARGV[at + 1],
    'accepted_ms', batch.accepted_ms, 'attempts', attempts, 'seq', 0, 'owner', '', 'deadline', 0,
    'not_before', 0, 'kind', batch.kind, 'backfill', batch.backfill or '', 'parent', ARGV[1])
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[4]), ARGV[at])
  redis.call('HINCRBY', KEYS[3], 'stage:ingest', 1)
end
return 1
