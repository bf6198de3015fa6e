-- Take a batch in: payload, ledger entry and source cursor in one step.
-- KEYS batch, payload, due, counts, workloads, totals, cursors, closed, dead
-- ARGV id, payload, content hash, lines, records, workload, meta (JSON), stage,
--      max bytes, max batches, overdue ms, cursor key, cursor ('' = none), keep s ('' = process it; else it is only
--      counted, because its workload is not watched), class ('1' = backfill, '' = fresh), max bytes of dead letters,
--      max bytes for backfill, max batches for backfill, '1' when the cursor is compared, the cursor that the batch
--      continues from ('' = none), part of Redis' memory that may be used
-- returns {'accepted', pending batches} | {'skipped'} | {'duplicate', state} | {'conflict'} | {'full', pending bytes, pending batches, reason}
--         (reason: closed, dead, memory, bytes or batches) | {'moved', cursor ('' = none)}: the source is not where it thinks
-- invariant: an id is accepted once; pending bytes and batches stay under their limits and Redis under that part of its
--            memory (unless nothing waits, so that it could not get less), and what backfill may not use
--            is kept for fresh batches; nothing new is taken in while the door is closed or dead letters fill their
--            room; the cursor moves exactly when its batch is in, and a source that
--            goes on from elsewhere (Redis went back to what it had on disk, or another sender reads the same) is told.
local known = redis.call('HMGET', KEYS[1], 'hash', 'state')
if ARGV[19] ~= '' then
  local stands = redis.call('HGET', KEYS[7], ARGV[12]) or ''
  -- Behind its own batch the cursor stands when only the answer was lost.
  if stands ~= ARGV[20] and not (stands == ARGV[13] and known[1] == ARGV[3]) then return { 'moved', stands } end
end
if known[1] then
  if known[1] ~= ARGV[3] then return { 'conflict' } end
  if ARGV[13] ~= '' then redis.call('HSET', KEYS[7], ARGV[12], ARGV[13]) end
  return { 'duplicate', known[2] }
end
local bytes = tonumber(redis.call('HGET', KEYS[4], 'bytes') or '0')
local batches = tonumber(redis.call('HGET', KEYS[4], 'batches') or '0')
if redis.call('EXISTS', KEYS[8]) == 1 then return { 'full', bytes, batches, 'closed' } end
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
-- An older build's scripts take dead letters away without their bytes.
if redis.call('ZCARD', KEYS[9]) > 0 and tonumber(redis.call('HGET', KEYS[4], 'dead_bytes') or '0') >= tonumber(ARGV[16]) then
  return { 'full', bytes, batches, 'dead' }
end
-- What waits grows as it is worked on (work:<id> can have twice the size of its payload), and at maxmemory Redis refuses
-- even the scripts that would free some. INFO may be forbidden to this user: then only the limits below hold.
local info = redis.pcall('INFO', 'memory')
if batches > 0 and type(info) == 'string' then
  local used, most = tonumber(info:match('used_memory:(%d+)')), tonumber(info:match('maxmemory:(%d+)'))
  if used and most and most > 0 and used > most * tonumber(ARGV[21]) then return { 'full', bytes, batches, 'memory' } end
end
local most_bytes, most_batches = tonumber(ARGV[9]), tonumber(ARGV[10])
if ARGV[15] ~= '' then most_bytes, most_batches = tonumber(ARGV[17]), tonumber(ARGV[18]) end
-- One batch larger than the whole limit still gets in when nothing else waits; otherwise it never could.
if batches > 0 and bytes + size > most_bytes then return { 'full', bytes, batches, 'bytes' } end
if batches > 0 and batches + 1 > most_batches then return { 'full', bytes, batches, 'batches' } end
local now = now_ms()
redis.call('SET', KEYS[2], ARGV[2])
redis.call('HSET', KEYS[1], 'state', ARGV[8], 'hash', ARGV[3], 'lines', ARGV[4], 'records', ARGV[5],
  'workload', ARGV[6], 'meta', ARGV[7], 'bytes', size, 'accepted_ms', now,
  'attempts', 0, 'seq', 0, 'owner', '', 'deadline', 0, 'not_before', 0, 'kind', 'fresh',
  'backfill', ARGV[15])
redis.call('ZADD', KEYS[3], now + tonumber(ARGV[11]), ARGV[1])
redis.call('HINCRBY', KEYS[4], 'bytes', size)
redis.call('HINCRBY', KEYS[4], 'batches', 1)
redis.call('HINCRBY', KEYS[4], 'stage:' .. ARGV[8], 1)
redis.call('SADD', KEYS[5], ARGV[6])
redis.call('HINCRBY', KEYS[6], 'accepted', ARGV[4])
redis.call('HINCRBY', KEYS[6], 'accepted_records', ARGV[5])
redis.call('HSET', KEYS[6], 'last_ms', now)
if ARGV[13] ~= '' then redis.call('HSET', KEYS[7], ARGV[12], ARGV[13]) end
return { 'accepted', batches + 1 }
