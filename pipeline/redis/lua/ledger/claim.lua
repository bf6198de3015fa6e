-- Take a waiting batch for one stage, before any user code runs.
-- KEYS batch, due, in_flight
-- ARGV the struct ClaimArgs (ledger/arguments.py) as msgpack
-- returns {'claimed' | 'exhausted', seq, attempts, flat ledger fields ...} | {'unknown'} | {'finished', state}
--         | {'elsewhere', state} | {'held', ms left} | {'early', ms left} | {'tried', attempts}
-- invariant: at most one unexpired claim per batch; attempts are counted here, so that a killed worker counts.
--            No number is given twice for the same id, whatever Redis forgot between two claims.
--            'exhausted' is a claim too: its holder must split or bury the batch, not try it again.
local a = cmsgpack.unpack(ARGV[1])
local batch = fields(KEYS[1])
if not batch.state then
  redis.call('ZREM', KEYS[2], a.batch_id)
  redis.call('ZREM', KEYS[3], a.batch_id)
  return { 'unknown' }
end
if batch.state == 'done' or batch.state == 'dead' or batch.state == 'split' then return { 'finished', batch.state } end
if batch.state ~= a.stage then return { 'elsewhere', batch.state } end
local now = now_ms()
if batch.owner ~= '' and tonumber(batch.deadline) > now then return { 'held', batch.deadline - now } end
if tonumber(batch.not_before) > now then return { 'early', batch.not_before - now } end
if a.first and tonumber(batch.attempts) > 0 then return { 'tried', batch.attempts } end
local verdict = 'claimed'
if tonumber(batch.attempts) >= a.max_attempts then verdict = 'exhausted' end
-- A claim that nobody gave back: that, and no older trouble, is what happened to the batch.
if batch.owner ~= '' then redis.call('HSET', KEYS[1], 'error', 'the worker died or hung in stage ' .. a.stage) end
-- Redis may come back without the entry, or without its last claims, and their holders may still be at work: a count
-- alone would give their numbers to others.
local seq = math.max(tonumber(batch.seq or '0') + 1, now)
redis.call('HSET', KEYS[1], 'seq', seq)
local attempts = redis.call('HINCRBY', KEYS[1], 'attempts', 1)
redis.call('HSET', KEYS[1], 'owner', a.owner, 'deadline', now + a.ttl_ms)
redis.call('ZADD', KEYS[2], now + a.ttl_ms, a.batch_id)
local answer = { verdict, seq, attempts }
for _, item in ipairs(redis.call('HGETALL', KEYS[1])) do answer[#answer + 1] = item end
return answer
