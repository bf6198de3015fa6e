-- Ends a batch that is in every sink: done.
-- KEYS batch, due, counts, totals, payload, work, warming, drift, observations, watching
-- ARGV the struct CommitArgs (ledger/arguments.py) as msgpack, observation ("": none)
-- returns 1, or 0 when the claim is no longer ours (the next holder repeats the sink write, which is idempotent)
-- invariant: counters change exactly once per batch, and only this script makes a batch done. Of a finished batch the
--            entry keeps its identity and its outcome: 320 bytes instead of 2,130, for days. The watcher gets every
--            finished batch once; past the limit the oldest observations are dropped and counted.
local a = cmsgpack.unpack(ARGV[1])
local batch = fields(KEYS[1])
if not holds(batch, a.seq) then return 0 end
redis.call('ZREM', KEYS[2], a.batch_id)
redis.call('HINCRBY', KEYS[3], 'stage:' .. batch.state, -1)
redis.call('HINCRBY', KEYS[3], 'batches', -1)
redis.call('HINCRBY', KEYS[3], 'bytes', 0 - tonumber(batch.bytes))
-- A rescored batch was counted as stored the first time.
if batch.kind ~= 'rescore' then
  redis.call('HINCRBY', KEYS[4], 'stored', batch.lines)
  redis.call('HINCRBY', KEYS[4], 'stored_records', batch.records)
end
redis.call('HINCRBY', KEYS[4], 'commits', 1)
for i = 1, #a.totals, 2 do redis.call('HINCRBY', KEYS[4], a.totals[i], a.totals[i + 1]) end
for i = 1, #a.drift, 2 do redis.call('HINCRBY', KEYS[8], a.drift[i], a.drift[i + 1]) end
if #a.drift > 0 then redis.call('EXPIRE', KEYS[8], a.drift_keep_s) end
if ARGV[2] ~= '' then
  redis.call('HSETNX', KEYS[10], 'round_ms', now_ms())
  local size = redis.call('RPUSH', KEYS[9], ARGV[2])
  local bytes = redis.call('HINCRBY', KEYS[10], 'bytes', #ARGV[2])
  while size > a.max_observations or bytes > a.max_observed_bytes do
    local oldest = redis.call('LPOP', KEYS[9])
    if not oldest then break end
    size, bytes = size - 1, redis.call('HINCRBY', KEYS[10], 'bytes', 0 - #oldest)
    redis.call('HINCRBY', KEYS[10], 'head', 1)
    redis.call('HINCRBY', KEYS[10], 'dropped', 1)
  end
end
redis.call('DEL', KEYS[5], KEYS[6])
if a.warming then
  -- It will be read back from the sink when a model arrives, so its entry must not expire before that.
  redis.call('HSET', KEYS[1], 'state', 'done', 'owner', '', 'deadline', 0, 'done_ms', now_ms(), 'error', '', 'bytes', 0)
  redis.call('ZADD', KEYS[7], batch.accepted_ms, a.batch_id)
  redis.call('PERSIST', KEYS[1])
else
  keep_slim(KEYS[1], batch, 'done', a.keep_s)
end
return 1
