-- Take a batch in: payload, ledger entry and source cursor in one step.
-- KEYS batch, payload, due, counts, workloads, totals, cursors
-- ARGV id, payload, content hash, lines, records, workload, meta (JSON), stage,
--      max bytes, max batches, overdue ms, cursor key, cursor ('' = none), keep s ('' = process it; else it is only
--      counted, because its workload is not watched)
-- returns {'accepted'} | {'skipped'} | {'duplicate', state} | {'conflict'} | {'full', pending bytes, pending batches}
-- invariant: an id is accepted once; pending bytes and batches stay under their limits; the cursor moves
--            exactly when its batch is in.
local known = redis.call('HMGET', KEYS[1], 'hash', 'state')
if known[1] then
  if known[1] ~= ARGV[3] then return { 'conflict' } end
  if ARGV[13] ~= '' then redis.call('HSET', KEYS[7], ARGV[12], ARGV[13]) end
  return { 'duplicate', known[2] }
end
if ARGV[14] ~= '' then
  -- Remembered like any other, so that sending it again does not count it twice.
  redis.call('HSET', KEYS[1], 'state', 'done', 'hash', ARGV[3], 'lines', ARGV[4], 'records', ARGV[5],
    'workload', ARGV[6], 'skipped', 1)
  redis.call('EXPIRE', KEYS[1], ARGV[14])
  redis.call('SADD', KEYS[5], ARGV[6])
  redis.call('HINCRBY', KEYS[6], 'accepted', ARGV[4])
  redis.call('HINCRBY', KEYS[6], 'skipped', ARGV[4])
  redis.call('HSET', KEYS[6], 'last_ms', now_ms())
  if ARGV[13] ~= '' then redis.call('HSET', KEYS[7], ARGV[12], ARGV[13]) end
  return { 'skipped' }
end
local size = #ARGV[2]
local bytes = tonumber(redis.call('HGET', KEYS[4], 'bytes') or '0')
local batches = tonumber(redis.call('HGET', KEYS[4], 'batches') or '0')
-- One batch larger than the whole limit still gets in when nothing else waits; otherwise it never could.
if batches > 0 and (bytes + size > tonumber(ARGV[9]) or batches + 1 > tonumber(ARGV[10])) then
  return { 'full', bytes, batches }
end
local now = now_ms()
redis.call('SET', KEYS[2], ARGV[2])
redis.call('HSET', KEYS[1], 'state', ARGV[8], 'hash', ARGV[3], 'lines', ARGV[4], 'records', ARGV[5],
  'workload', ARGV[6], 'meta', ARGV[7], 'bytes', size, 'accepted_ms', now,
  'attempts', 0, 'seq', 0, 'owner', '', 'deadline', 0, 'not_before', 0, 'kind', 'fresh')
redis.call('ZADD', KEYS[3], now + tonumber(ARGV[11]), ARGV[1])
redis.call('HINCRBY', KEYS[4], 'bytes', size)
redis.call('HINCRBY', KEYS[4], 'batches', 1)
redis.call('HINCRBY', KEYS[4], 'stage:' .. ARGV[8], 1)
redis.call('SADD', KEYS[5], ARGV[6])
redis.call('HINCRBY', KEYS[6], 'accepted', ARGV[4])
redis.call('HINCRBY', KEYS[6], 'accepted_records', ARGV[5])
redis.call('HSET', KEYS[6], 'last_ms', now)
if ARGV[13] ~= '' then redis.call('HSET', KEYS[7], ARGV[12], ARGV[13]) end
return { 'accepted' }
