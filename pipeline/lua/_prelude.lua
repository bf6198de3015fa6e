-- Shared by every script: one clock (Redis TIME, so that no machine's clock counts) and hash reading.
-- Redis before 7.0 needs effects replication switched on before a script writes after reading TIME.
if redis.replicate_commands then redis.replicate_commands() end
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
