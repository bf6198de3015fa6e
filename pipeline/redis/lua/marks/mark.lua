-- Change the marks.
-- KEYS marks (hash: kind:number:workload -> msgpack; the field '' is the version)
-- ARGV the struct PutArgs | RevokeArgs (marks/store.py) as msgpack
-- returns put: {'done', 1 when the field was there | 0} | {'full'}; revoke: fields that were there
-- invariant: the version is another one after every change, also where Redis has lost its last second: it is the time
-- in microseconds, and grows.
local a = cmsgpack.unpack(ARGV[1])
local answer, changed = { 'done', 0 }, false
if not a.fields then
  for i = 1, #a.stale, 2 do
    if redis.call('HGET', KEYS[1], a.stale[i]) == a.stale[i + 1] then
      redis.call('HDEL', KEYS[1], a.stale[i])
      changed = true
    end
  end
  local others = redis.call('HLEN', KEYS[1]) - redis.call('HEXISTS', KEYS[1], '') - redis.call('HEXISTS', KEYS[1], a.field)
  if others < a.most then
    answer[2] = 1 - redis.call('HSET', KEYS[1], a.field, a.value)
    changed = true
  else
    answer = { 'full' }
  end
else
  answer = {}
  for _, field in ipairs(a.fields) do
    if field ~= '' and redis.call('HDEL', KEYS[1], field) == 1 then answer[#answer + 1] = field end
  end
  changed = #answer > 0
end
if changed then
  local t = redis.call('TIME')
  local now = t[1] * 1000000 + t[2]
  local before = tonumber(redis.call('HGET', KEYS[1], '') or '') or 0
  if now <= before then now = before + 1 end
  redis.call('HSET', KEYS[1], '', string.format('%.0f', now))
end
return answer
