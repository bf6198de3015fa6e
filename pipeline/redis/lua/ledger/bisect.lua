-- Replaces a batch that keeps failing by its two halves, so that poison records end up alone.
-- KEYS batch, due, counts, payload, work, in_flight, left batch, left payload, right batch, right payload
-- ARGV the struct BisectArgs (ledger/arguments.py) as msgpack, payload of each half
-- returns 1, or 0 when the claim is no longer ours
-- invariant: the halves hold exactly the lines of the parent. A half with several records gets one attempt before it is
--            bisected again, a single record gets all attempts.
local a = cmsgpack.unpack(ARGV[1])
local batch = fields(KEYS[1])
if not holds(batch, a.seq) then return 0 end
local now = now_ms()
keep_slim(KEYS[1], batch, 'split', a.keep_s)
redis.call('ZREM', KEYS[2], a.batch_id)
redis.call('ZREM', KEYS[6], a.batch_id)
redis.call('HINCRBY', KEYS[3], 'stage:' .. batch.state, -1)
redis.call('HINCRBY', KEYS[3], 'batches', 1)
redis.call('HINCRBY', KEYS[3], 'bytes', #ARGV[2] + #ARGV[3] - tonumber(batch.bytes))
redis.call('DEL', KEYS[4], KEYS[5])
for i, half in ipairs(a.halves) do
  local entry, payload = KEYS[5 + i * 2], KEYS[6 + i * 2]
  local attempts = half.records > 1 and a.max_attempts - 1 or 0
  -- A parent that was forgotten and accepted anew has the same halves: their old entries would expire.
  redis.call('DEL', entry)
  begin_batch(half, { state = 'ingest', workload = batch.workload, meta = a.meta, accepted_ms = batch.accepted_ms,
    attempts = attempts, kind = batch.kind, backfill = batch.backfill or '', parent = a.batch_id },
    { batch = entry, payload = payload, due = KEYS[2], in_flight = KEYS[6] }, ARGV[i + 1], now + a.overdue_ms)
  redis.call('HINCRBY', KEYS[3], 'stage:ingest', 1)
end
return 1
