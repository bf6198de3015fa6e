-- Which of these lines have been scored, which are with somebody now, and which the asker has to score.
-- KEYS young, old
-- ARGV the struct AskArgs (models/single_flight.py) as msgpack, then fields (version and masked line)
-- returns per field: its evidence | 1 (yours: say what came of it with evidence_tell) | 0 (somebody's; ask again)
-- invariant: of all who ask, one at a time is told to score a line. Nothing but work hangs on it: what is forgotten here
--            is scored again. A half holds at most 500 fields more than the limit, and vanishes when nobody writes for a
--            ttl.
-- A mark of who scores a line begins with 'm', which no evidence (a msgpack list) does.
local a = cmsgpack.unpack(ARGV[1])
local now, answer = now_ms(), {}
local mark = 'm' .. string.format('%.0f', now + a.claim_ms) .. ':' .. a.owner
for from = 2, #ARGV, 500 do
  local to, marks = math.min(from + 499, #ARGV), {}
  local young = redis.call('HMGET', KEYS[1], unpack(ARGV, from, to))
  local old = redis.call('HMGET', KEYS[2], unpack(ARGV, from, to))
  for i = from, to do
    local value = young[i - from + 1] or old[i - from + 1]
    local until_ms, owner = string.match(value or 'm0:', '^m(%d+):(.*)$')
    if not until_ms then
      answer[#answer + 1] = value
    elseif owner ~= a.owner and tonumber(until_ms) > now then
      answer[#answer + 1] = 0
    else
      answer[#answer + 1] = 1
      marks[#marks + 1] = ARGV[i]
      marks[#marks + 1] = mark
    end
  end
  if #marks > 0 then
    if redis.call('HLEN', KEYS[1]) >= a.half_limit then redis.call('RENAME', KEYS[1], KEYS[2]) end
    redis.call('HSET', KEYS[1], unpack(marks))
  end
end
redis.call('EXPIRE', KEYS[1], a.ttl_s)
redis.call('EXPIRE', KEYS[2], a.ttl_s)
return answer
