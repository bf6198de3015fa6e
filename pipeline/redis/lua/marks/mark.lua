-- Change the marks.
-- KEYS marks (hash: kind:number:workload -> msgpack; the field '' is the version)
-- ARGV 'put', most, field, value, then fields and values to be forgotten where they are still so
--    | 'revoke', fields
-- returns put: {'done', 1 when the field was there | 0} | {'full'}; revoke: fields that were there
-- invariant: the version is another one after every change, also where Redis has lost its last second: it is the time
-- in microseconds, and grows.
local answer, changed = { 'done', 0 }, false
if ARGV[1] == 'put' then
  for i = 5, #ARGV, 2 do
    if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then
      redis.call('HDEL', KEYS[1], ARGV[i])
      changed = true
    end
  end
  local others = redis.call('HLEN', KEYS[1]) - redis.call('HEXISTS', KEYS[1], '') - redis.call('HEXISTS', KEYS[1], ARGV[3])
  if others < tonumber(ARGV[2]) then
    answer[2] = 1 - redis.call('HSET', KEYS[1], ARGV[3], ARGV[4])
    changed = true
  else
    answer = { 'full' }
  end
else
  answer = {}
  for i = 2, #ARGV do
    if ARGV[i] ~= '' and redis.call('HDEL', KEYS[1], ARGV[i]) == 1 then answer[#answer + 1] = ARGV[i] end
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
