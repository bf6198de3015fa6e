-- Takes records out of a batch of several workloads, as batches of one workload each.
-- KEYS batch, due, counts, payload, in_flight, batch and payload of each new one
-- ARGV the struct SeparateArgs (ledger/arguments.py) as msgpack, payload of the other records ('': none), of each new
--      batch
-- returns 1, or 0 when the claim is no longer ours
-- invariant: each record is in one of the batches, before and after. Without other records the batch has ended as
--            split. Idempotent, because a record leaves its batch once and gives the new batch its id.
local a = cmsgpack.unpack(ARGV[1])
local batch = fields(KEYS[1])
if redis.call('HGET', KEYS[6], 'parent') == a.batch_id then return 1 end
if not holds(batch, a.seq) then return 0 end
local now, size, more = now_ms(), #ARGV[2], #a.parts
if size > 0 then
  redis.call('SET', KEYS[4], ARGV[2])
  local shares = cjson.decode(batch.shares)
  for _, part in ipairs(a.parts) do shares[part.workload] = nil end
  redis.call('HSET', KEYS[1], 'bytes', size, 'lines', a.lines, 'records', a.records, 'shares', cjson.encode(shares))
else
  keep_slim(KEYS[1], batch, 'split', a.keep_s)
  redis.call('ZREM', KEYS[2], a.batch_id)
  redis.call('ZREM', KEYS[5], a.batch_id)
  redis.call('HINCRBY', KEYS[3], 'stage:' .. batch.state, -1)
  redis.call('DEL', KEYS[4])
  more = more - 1
end
for i, part in ipairs(a.parts) do
  local entry, payload = KEYS[4 + i * 2], KEYS[5 + i * 2]
  begin_batch(part, { state = 'ingest', workload = part.workload, meta = batch.meta, accepted_ms = batch.accepted_ms,
    attempts = 0, kind = 'fresh', backfill = batch.backfill or '', parent = a.batch_id },
    { batch = entry, payload = payload, due = KEYS[2], in_flight = KEYS[5] }, ARGV[i + 2], now + a.overdue_ms)
  redis.call('HINCRBY', KEYS[3], 'stage:ingest', 1)
  size = size + #ARGV[i + 2]
end
redis.call('HINCRBY', KEYS[3], 'batches', more)
redis.call('HINCRBY', KEYS[3], 'bytes', size - tonumber(batch.bytes))
return 1
