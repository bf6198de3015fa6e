-- Ends a batch that is in every sink: done.
-- KEYS batch, due, counts, payload, work, warming, observations, watching, in_flight, totals of each workload, drift of each version
-- ARGV the struct CommitArgs (ledger/arguments.py) as msgpack, observations
-- returns 1, or 0 when the claim is no longer ours (the next holder repeats the sink write, which is idempotent)
-- invariant: counters change exactly once per batch, and only this script makes a batch done. Of a finished batch the
--            entry keeps its identity and its outcome: 320 bytes instead of 2,130, for days. The watcher gets every
--            finished batch once; past the limit the oldest observations are dropped and counted.
local a = cmsgpack.unpack(ARGV[1])
local batch = fields(KEYS[1])
if not holds(batch, a.seq) then return 0 end
local OBSERVATIONS, WATCHING = KEYS[7], KEYS[8]
redis.call('ZREM', KEYS[2], a.batch_id)
redis.call('ZREM', KEYS[9], a.batch_id)
redis.call('HINCRBY', KEYS[3], 'stage:' .. batch.state, -1)
redis.call('HINCRBY', KEYS[3], 'batches', -1)
redis.call('HINCRBY', KEYS[3], 'bytes', 0 - tonumber(batch.bytes))
for i, one in ipairs(a.workloads) do
  local totals = KEYS[9 + i]
  -- A rescored batch was counted as stored the first time.
  if batch.kind ~= 'rescore' then
    redis.call('HINCRBY', totals, 'stored', one.lines)
    redis.call('HINCRBY', totals, 'stored_records', one.records)
  end
  redis.call('HINCRBY', totals, 'commits', 1)
  for j = 1, #one.totals, 2 do redis.call('HINCRBY', totals, one.totals[j], one.totals[j + 1]) end
end
for i, counted in ipairs(a.drift) do
  local drift = KEYS[9 + #a.workloads + i]
  for j = 1, #counted, 2 do redis.call('HINCRBY', drift, counted[j], counted[j + 1]) end
  redis.call('EXPIRE', drift, a.drift_keep_s)
end
for i = 2, #ARGV do
  redis.call('HSETNX', WATCHING, 'round_ms', now_ms())
  local size = redis.call('RPUSH', OBSERVATIONS, ARGV[i])
  local bytes = redis.call('HINCRBY', WATCHING, 'bytes', #ARGV[i])
  while size > a.max_observations or bytes > a.max_observed_bytes do
    local oldest = redis.call('LPOP', OBSERVATIONS)
    if not oldest then break end
    size, bytes = size - 1, redis.call('HINCRBY', WATCHING, 'bytes', 0 - #oldest)
    redis.call('HINCRBY', WATCHING, 'head', 1)
    redis.call('HINCRBY', WATCHING, 'dropped', 1)
  end
end
redis.call('DEL', KEYS[4], KEYS[5])
if a.warming then
  -- It will be read back from the sink when a model arrives, so its entry must not expire before that.
  redis.call('HSET', KEYS[1], 'state', 'done', 'owner', '', 'deadline', 0, 'done_ms', now_ms(), 'error', '', 'bytes', 0)
  redis.call('ZADD', KEYS[6], batch.accepted_ms, a.batch_id)
  redis.call('PERSIST', KEYS[1])
else
  keep_slim(KEYS[1], batch, 'done', a.keep_s)
end
return 1
