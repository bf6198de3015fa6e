-- Takes a batch in: payload, ledger entry and source cursor in one step.
-- KEYS batch, payload, due, counts, workloads, totals, cursors, closed, dead
-- ARGV the struct AcceptArgs (ledger/arguments.py) as msgpack, payload
-- returns {'accepted', pending batches} | {'skipped'} | {'duplicate', state} | {'conflict'}
--         | {'full', pending bytes, pending batches, reason}   reason: closed, dead, memory, bytes or batches
--         | {'moved', cursor ('' = none)}   the cursor is not where the source says
-- invariant: an id is accepted once. Pending bytes and batches stay under their limits, and Redis under its part of
--            memory, unless nothing waits. Backfill leaves room for fresh batches. A closed gate and full dead letters
--            take nothing in. The cursor moves exactly when its batch is in.
local a = cmsgpack.unpack(ARGV[1])
local BATCH, PAYLOAD, DUE, COUNTS, WORKLOADS, TOTALS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local CURSORS, CLOSED, DEAD = KEYS[7], KEYS[8], KEYS[9]
local function move_cursor()
  if a.cursor then redis.call('HSET', CURSORS, a.cursor_key, a.cursor) end
end
local known = redis.call('HMGET', BATCH, 'hash', 'state')
if a.after then
  local position = redis.call('HGET', CURSORS, a.cursor_key) or ''
  -- The cursor stands behind its own batch when only the answer was lost.
  if position ~= a.after and not (position == (a.cursor or '') and known[1] == a.content) then
    return { 'moved', position }
  end
end
if known[1] then
  if known[1] ~= a.content then return { 'conflict' } end
  move_cursor()
  return { 'duplicate', known[2] }
end
local bytes = tonumber(redis.call('HGET', COUNTS, 'bytes') or '0')
local batches = tonumber(redis.call('HGET', COUNTS, 'batches') or '0')
if redis.call('EXISTS', CLOSED) == 1 then return { 'full', bytes, batches, 'closed' } end
if a.skip_keep_s then
  -- The id is remembered, so that sending it again does not count its lines twice.
  redis.call('HSET', BATCH, 'state', 'done', 'hash', a.content, 'lines', a.lines, 'records', a.records,
    'workload', a.workload, 'skipped', 1)
  redis.call('EXPIRE', BATCH, a.skip_keep_s)
  redis.call('SADD', WORKLOADS, a.workload)
  redis.call('HINCRBY', TOTALS, 'accepted', a.lines)
  redis.call('HINCRBY', TOTALS, 'skipped', a.lines)
  redis.call('HSET', TOTALS, 'last_ms', now_ms())
  move_cursor()
  return { 'skipped' }
end
local size = #ARGV[2]
if redis.call('ZCARD', DEAD) > 0 and tonumber(redis.call('HGET', COUNTS, 'dead_bytes') or '0') >= a.max_dead_bytes then
  return { 'full', bytes, batches, 'dead' }
end
-- Waiting batches grow (work:<id> can have twice the size of its payload), and at maxmemory Redis refuses even the
-- scripts that would free memory. INFO may be forbidden to this user: then only the limits below hold.
local info = redis.pcall('INFO', 'memory')
if batches > 0 and type(info) == 'string' then
  local used, most = tonumber(info:match('used_memory:(%d+)')), tonumber(info:match('maxmemory:(%d+)'))
  if used and most and most > 0 and used > most * a.memory_part then return { 'full', bytes, batches, 'memory' } end
end
-- A batch larger than the whole limit gets in when nothing else waits; otherwise it never could.
if batches > 0 and bytes + size > a.max_bytes then return { 'full', bytes, batches, 'bytes' } end
if batches > 0 and batches + 1 > a.max_batches then return { 'full', bytes, batches, 'batches' } end
local now = now_ms()
redis.call('SET', PAYLOAD, ARGV[2])
redis.call('HSET', BATCH, 'state', a.stage, 'hash', a.content, 'lines', a.lines, 'records', a.records,
  'workload', a.workload, 'meta', a.meta, 'bytes', size, 'accepted_ms', now,
  'attempts', 0, 'seq', 0, 'owner', '', 'deadline', 0, 'not_before', 0, 'kind', 'fresh',
  'backfill', a.backfill and '1' or '')
redis.call('ZADD', DUE, now + a.overdue_ms, a.batch_id)
redis.call('HINCRBY', COUNTS, 'bytes', size)
redis.call('HINCRBY', COUNTS, 'batches', 1)
redis.call('HINCRBY', COUNTS, 'stage:' .. a.stage, 1)
redis.call('SADD', WORKLOADS, a.workload)
redis.call('HINCRBY', TOTALS, 'accepted', a.lines)
redis.call('HINCRBY', TOTALS, 'accepted_records', a.records)
redis.call('HSET', TOTALS, 'last_ms', now)
move_cursor()
return { 'accepted', batches + 1 }
