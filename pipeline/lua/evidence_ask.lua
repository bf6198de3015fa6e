-- Which of these lines have been scored, which are with somebody now, and which the asker has to score.
-- KEYS young, old
-- ARGV owner, ms that a line is left to whoever began with it, limit of the young half, ttl s, then fields (version and
--      masked line)
-- returns per field: its evidence | 1 (yours: say what came of it with evidence_tell) | 0 (somebody's; ask again)
-- invariant: of all who ask, one at a time is told to score a line. Nothing but work hangs on it: what is forgotten here
--            is scored again. Both halves together hold at most twice the limit, and vanish when nobody writes for a ttl.
-- A mark of who scores a line begins with 'm', which no evidence (a msgpack list) does.
local now, answer = now_ms(), {}
local function known(field) return redis.call('HGET', KEYS[1], field) or redis.call('HGET', KEYS[2], field) end
for i = 5, #ARGV do
  local value = known(ARGV[i])
  if value and string.sub(value, 1, 1) ~= 'm' then
    answer[#answer + 1] = value
  else
    local until_ms, owner = string.match(value or '', '^m(%d+):(.*)$')
    if owner and owner ~= ARGV[1] and tonumber(until_ms) > now then
      answer[#answer + 1] = 0
    else
      if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then redis.call('RENAME', KEYS[1], KEYS[2]) end
      redis.call('HSET', KEYS[1], ARGV[i], 'm' .. string.format('%.0f', now + tonumber(ARGV[2])) .. ':' .. ARGV[1])
      answer[#answer + 1] = 1
    end
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return answer
