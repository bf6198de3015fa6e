-- Shared by every script: one clock (Redis TIME, so that no machine's clock counts) and hash reading.
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function fields(key)
  local flat, map = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do map[flat[i]] = flat[i + 1] end
  return map
end
-- A claim counts only while its number is the newest and its deadline has not passed.
local function holds(batch, seq)
  return batch.seq == seq and batch.owner ~= nil and batch.owner ~= '' and tonumber(batch.deadline) > now_ms()
end
-- Of a batch among those in flight: its lane (0 fresh, 1 backfill, 2 rescored), and then when it was accepted. So the oldest of
-- a lane is the first one of a range (ledger/backlog.py).
local function in_flight_score(kind, backfill, accepted_ms)
  local lane = kind == 'rescore' and 2 or (backfill == '1' and 1 or 0)
  return lane * 2 ^ 42 + tonumber(accepted_ms or '0')
end
-- What is kept of a batch that has ended, for `keep_s`: what tells it from a new one, and what became of it.
local function keep_slim(key, batch, state, keep_s)
  redis.call('DEL', key)
  redis.call('HSET', key, 'state', state, 'hash', batch.hash, 'lines', batch.lines, 'records', batch.records,
    'workload', batch.workload, 'kind', batch.kind or 'fresh', 'seq', batch.seq,
    'accepted_ms', batch.accepted_ms or 0, 'done_ms', now_ms())
  redis.call('EXPIRE', key, keep_s)
end
-- A dead letter is one no more (ledger/retry.lua, ledger/discard.lua). Those of an older build were not counted when they were buried,
-- and its scripts take none back: with the last one gone nothing is counted.
local function forget_dead_bytes(counts, dead, key, batch)
  redis.call('HDEL', key, 'dead_bytes')
  redis.call('HINCRBY', counts, 'dead_bytes', 0 - tonumber(batch.dead_bytes or '0'))
  if redis.call('ZCARD', dead) == 0 then redis.call('HSET', counts, 'dead_bytes', 0) end
end
-- Put a training in the queue (training/request.lua, training/end.lua).
local function queue_training(training, queue, keys, trainings, id, key, request, pause_ms)
  local now = now_ms()
  redis.call('HSET', training, 'state', 'queued', 'request', request, 'key', key, 'created_ms', now,
    'not_before_ms', now + tonumber(pause_ms))
  redis.call('ZADD', queue, now + tonumber(pause_ms), id)
  redis.call('HSET', keys, key, id)
  redis.call('ZADD', trainings, now, id)
end
-- A training has ended: it gets the next number, so that who counts needs no clock; the oldest ended ones are forgotten.
local function count_ended(ended, trainings, id, keep)
  local newest = redis.call('ZRANGE', ended, -1, -1, 'WITHSCORES')
  redis.call('ZADD', ended, (tonumber(newest[2]) or 0) + 1, id)
  local surplus = redis.call('ZCARD', ended) - tonumber(keep)
  if surplus > 0 then
    for _, old in ipairs(redis.call('ZRANGE', ended, 0, surplus - 1)) do redis.call('ZREM', trainings, old) end
    redis.call('ZREMRANGEBYRANK', ended, 0, surplus - 1)
  end
end
-- Something that others follow happens in this step (observe/events.py has the types). `data`: JSON.
local function add_event(events, kind, subject, data)
  redis.call('XADD', events, 'MAXLEN', '~', 20000, '*', 'type', kind, 'subject', subject, 'data', data)
end
-- The live pointer of a model (models/publish.lua, models/promote.lua). `history` is a JSON list of the versions that were live, the
-- live one last; going back takes the one that is left off it.
local function move_pointer(model, names, events, old, version, token, at, name, how)
  local history = cjson.decode(old.history or '[]')
  if how == 'rolled-back' then table.remove(history) end
  if history[#history] ~= version then history[#history + 1] = version end
  while #history > 50 do table.remove(history, 1) end
  local generation = redis.call('HINCRBY', model, 'generation', 1)
  redis.call('HSET', model, 'version', version, 'token', token, 'published', at, 'how', how,
    'published_ms', string.format('%.0f', now_ms()), 'history', cjson.encode(history))
  redis.call('SADD', names, name)
  add_event(events, 'model.live', version, cjson.encode({ version = version, model = name, how = how,
    generation = generation, before = old.version or '' }))
  return generation
end
