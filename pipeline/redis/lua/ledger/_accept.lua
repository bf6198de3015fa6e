-- Shared by accept.lua and accept_many.lua: the limits of the intake gate, and what is written of a batch.
-- `a` holds the limits, `b` describes a batch, `keys` names its batch and payload, due, in_flight, counts and workloads, and the
-- totals of each of its shares: its lines by workload.
local function pending(counts)
  local found = redis.call('HMGET', counts, 'bytes', 'batches')
  return tonumber(found[1] or '0'), tonumber(found[2] or '0')
end
-- Why `more` batches of `size` bytes do not get in beside those that wait; nil where they do.
local function no_room(a, counts, dead, bytes, batches, size, more)
  if redis.call('ZCARD', dead) > 0 and tonumber(redis.call('HGET', counts, 'dead_bytes') or '0') >= a.max_dead_bytes then
    return 'dead'
  end
  -- Whatever is larger than a whole limit gets in when nothing else waits; otherwise it never could.
  if batches == 0 then return nil end
  -- Waiting batches grow, and at maxmemory Redis refuses even the scripts that would free memory. Of 1,000 real lines by
  -- Zstandard, work:<id> has 0.2 to 1.2 times the size of the payload, and twice where no line repeats. It has 5 KiB of
  -- its own, so one line's is 20 times its payload: max_batches bounds that. INFO may be forbidden to this user: then
  -- only the limits below hold.
  local info = redis.pcall('INFO', 'memory')
  if type(info) == 'string' then
    local used, most = tonumber(info:match('used_memory:(%d+)')), tonumber(info:match('maxmemory:(%d+)'))
    if used and most and most > 0 and used > most * a.memory_part then return 'memory' end
  end
  if bytes + size > a.max_bytes then return 'bytes' end
  if batches + more > a.max_batches then return 'batches' end
end
-- The id of a skipped batch is remembered, so that sending it again does not count its lines twice.
local function skip_batch(b, keys, keep_s)
  redis.call('HSET', keys.batch, 'state', 'done', 'hash', b.content, 'lines', b.lines, 'records', b.records,
    'workload', b.workload, 'skipped', 1)
  redis.call('EXPIRE', keys.batch, keep_s)
  for i, share in ipairs(b.shares) do
    redis.call('SADD', keys.workloads, share.workload)
    redis.call('HINCRBY', keys.totals[i], 'accepted', share.lines)
    redis.call('HINCRBY', keys.totals[i], 'skipped', share.lines)
    redis.call('HSET', keys.totals[i], 'last_ms', now_ms())
  end
end
-- A batch whose records cannot be read: a dead letter from the start, with its payload. It has one share.
local function bury_batch(a, b, keys, payload)
  local now = now_ms()
  begin_batch(b, { state = 'dead', workload = b.workload, meta = b.meta, accepted_ms = now, attempts = 0, kind = 'fresh',
    backfill = a.backfill and '1' or '' }, keys, payload, now)
  redis.call('ZREM', keys.due, b.batch_id)
  redis.call('ZREM', keys.in_flight, b.batch_id)
  redis.call('HSET', keys.batch, 'error', b.dead, 'dead_ms', now, 'died_in', a.stage, 'dead_bytes', #payload,
    'first_line', b.first_line)
  redis.call('ZADD', keys.dead, now, b.batch_id)
  redis.call('HINCRBY', keys.counts, 'dead_bytes', #payload)
  for i, share in ipairs(b.shares) do
    redis.call('SADD', keys.workloads, share.workload)
    redis.call('HINCRBY', keys.totals[i], 'accepted', share.lines)
    redis.call('HINCRBY', keys.totals[i], 'accepted_records', share.records)
    redis.call('HINCRBY', keys.totals[i], 'dead', share.lines)
    redis.call('HSET', keys.totals[i], 'last_ms', now)
  end
end
-- A batch of several workloads keeps the lines of each, so that it can be counted even if nobody can read its payload.
local function take_batch(a, b, keys, payload)
  local now = now_ms()
  begin_batch(b, { state = a.stage, workload = b.workload, meta = b.meta, accepted_ms = now, attempts = 0, kind = 'fresh',
    backfill = a.backfill and '1' or '' }, keys, payload, now + a.overdue_ms)
  redis.call('HINCRBY', keys.counts, 'bytes', #payload)
  redis.call('HINCRBY', keys.counts, 'batches', 1)
  redis.call('HINCRBY', keys.counts, 'stage:' .. a.stage, 1)
  if #b.shares > 1 then
    local lines = {}
    for _, share in ipairs(b.shares) do lines[share.workload] = share.lines end
    redis.call('HSET', keys.batch, 'shares', cjson.encode(lines))
  end
  for i, share in ipairs(b.shares) do
    redis.call('SADD', keys.workloads, share.workload)
    redis.call('HINCRBY', keys.totals[i], 'accepted', share.lines)
    redis.call('HINCRBY', keys.totals[i], 'accepted_records', share.records)
    redis.call('HSET', keys.totals[i], 'last_ms', now)
  end
end
