-- The batch is in every sink: done.
-- KEYS batch, due, counts, totals, payload, work, warming, drift, observations, watching
-- ARGV id, seq, keep s, warming ('1': stored without a verdict), number of pairs for totals, keep s of drift,
--      observation ('' = none), most observations, most bytes of them,
--      then pairs of counter name and amount: first those of totals, then those of drift
-- returns 1, or 0 when the claim is no longer ours (the sink write is repeated by the next holder: it is idempotent)
-- invariant: counters change exactly once per batch; only here does a batch become 'done'. Of what is done only that is
--            kept which tells it from a new batch, and what became of it: 320 bytes instead of 2,130, for days.
--            What is watched is what is done, once; past the limit the oldest observations are dropped and counted.
local batch = fields(KEYS[1])
if not holds(batch, ARGV[2]) then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HINCRBY', KEYS[3], 'stage:' .. batch.state, -1)
redis.call('HINCRBY', KEYS[3], 'batches', -1)
redis.call('HINCRBY', KEYS[3], 'bytes', 0 - tonumber(batch.bytes))
-- A rescored batch was counted as stored the first time.
if batch.kind ~= 'rescore' then
  redis.call('HINCRBY', KEYS[4], 'stored', batch.lines)
  redis.call('HINCRBY', KEYS[4], 'stored_records', batch.records)
end
redis.call('HINCRBY', KEYS[4], 'commits', 1)
local first_drift = 10 + 2 * tonumber(ARGV[5])
for i = 10, #ARGV, 2 do redis.call('HINCRBY', KEYS[i < first_drift and 4 or 8], ARGV[i], ARGV[i + 1]) end
if #ARGV >= first_drift then redis.call('EXPIRE', KEYS[8], ARGV[6]) end
if ARGV[7] ~= '' then
  redis.call('HSETNX', KEYS[10], 'round_ms', now_ms())
  local size = redis.call('RPUSH', KEYS[9], ARGV[7])
  local bytes = redis.call('HINCRBY', KEYS[10], 'bytes', #ARGV[7])
  while size > tonumber(ARGV[8]) or bytes > tonumber(ARGV[9]) do
    local oldest = redis.call('LPOP', KEYS[9])
    if not oldest then break end
    size, bytes = size - 1, redis.call('HINCRBY', KEYS[10], 'bytes', 0 - #oldest)
    redis.call('HINCRBY', KEYS[10], 'head', 1)
    redis.call('HINCRBY', KEYS[10], 'dropped', 1)
  end
end
redis.call('DEL', KEYS[5], KEYS[6])
if ARGV[4] == '1' then
  -- It will be read back from the sink when a model arrives, so its entry must not expire before that.
  redis.call('HSET', KEYS[1], 'state', 'done', 'owner', '', 'deadline', 0, 'done_ms', now_ms(), 'error', '', 'bytes', 0)
  redis.call('ZADD', KEYS[7], batch.accepted_ms, ARGV[1])
  redis.call('PERSIST', KEYS[1])
else
  keep_slim(KEYS[1], batch, 'done', ARGV[3])
end
return 1
