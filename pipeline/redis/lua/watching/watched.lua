-- Writes the changes of one round of the watcher, and counts its observations as read.
-- KEYS lease, observations, watching, sessions, pulses, rates, incidents, outbox, pasts, past_due (pasts by expiry),
--      numbers, daily, left_out, events, then one sorted set of idle sessions per lane
-- ARGV one msgpack map, spelled in watching/state.py:RoundWire
-- returns 1, or 0 when the token is not the holder's, or Redis lost the state that the round has read. After a crash Redis
--         may lose the last writes (appendfsync everysec): tokens repeat and observations are replayed.
-- invariant: states, rows and the list change together or not at all, so every observation is in the states once.
local LEASE, OBSERVATIONS, WATCHING, SESSIONS, PULSES, RATES, INCIDENTS, OUTBOX, PASTS, PAST_DUE, NUMBERS,
  DAILY, LEFT_OUT, EVENTS = unpack(KEYS)
local FIRST_LANE, MOST = 15, 4000 -- values of one call, an even number: Lua's stack has 8,000
local round = cmsgpack.unpack(ARGV[1])
local lease = redis.call('HMGET', LEASE, 'token', 'deadline')
if lease[1] ~= round.token or tonumber(lease[2] or '0') <= now_ms() then return 0 end
if (redis.call('HGET', WATCHING, 'round') or '') ~= round.after then return 0 end
local head = tonumber(redis.call('HGET', WATCHING, 'head') or '0')
if round.newest ~= '' and head < round.head then
  local newest = redis.call('LINDEX', OBSERVATIONS, round.head - head - 1)
  if not newest or redis.sha1hex(newest) ~= round.newest then return 0 end
end
-- The list may have dropped the oldest at its limit since they were read: no others may go in their place.
local bytes = 0
local taken = round.head > head and redis.call('LPOP', OBSERVATIONS, round.head - head) or {}
for _, observation in ipairs(taken) do bytes, head = bytes + #observation, head + 1 end
redis.call('HINCRBY', WATCHING, 'bytes', 0 - bytes)
redis.call('HSET', WATCHING, 'head', head, 'round_ms', now_ms(), 'round', round.name)
if redis.call('EXISTS', OBSERVATIONS) == 0 then redis.call('HSET', WATCHING, 'bytes', 0) end
if round.incidents ~= '' then redis.call('SET', INCIDENTS, round.incidents) end
-- One call for thousands of values: a call for each session takes most of the time of a round.
local function in_parts(command, key, values)
  local done = 0
  for first = 1, #values, MOST do
    done = done + redis.call(command, key, unpack(values, first, math.min(first + MOST - 1, #values)))
  end
  return done
end
local stray = in_parts('HSET', SESSIONS, round.sessions) ~= round.new
for lane, names in ipairs(round.moved) do in_parts('ZREM', KEYS[FIRST_LANE + lane - 1], names) end
-- A damaged session, which counts as a new one, is still in the lane that it had.
if stray then
  local names = {}
  for place = 1, #round.sessions, 2 do names[#names + 1] = round.sessions[place] end
  for lane = FIRST_LANE, #KEYS do in_parts('ZREM', KEYS[lane], names) end
end
for lane, due in ipairs(round.due) do in_parts('ZADD', KEYS[FIRST_LANE + lane - 1], due) end
for lane = FIRST_LANE, #KEYS do in_parts('ZREM', KEYS[lane], round.closed) end
in_parts('HDEL', SESSIONS, round.closed)
in_parts('ZADD', PAST_DUE, round.histories_due)
in_parts('HSET', PASTS, round.histories)
in_parts('ZREM', PAST_DUE, round.forgotten_histories)
in_parts('HDEL', PASTS, round.forgotten_histories)
in_parts('HSET', PULSES, round.minute_counts)
in_parts('HSET', RATES, round.rates)
in_parts('HSET', DAILY, round.daily)
in_parts('HSET', NUMBERS, round.distributions)
in_parts('HSET', LEFT_OUT, round.left_out)
for _, key in ipairs({ PULSES, RATES, NUMBERS, DAILY, LEFT_OUT }) do in_parts('HDEL', key, round.forgotten) end
in_parts('HDEL', WATCHING, round.forgotten_times)
for _, event in ipairs(round.events) do add_event(EVENTS, unpack(event)) end
for _, entry in ipairs(round.rows) do redis.call('RPUSH', OUTBOX, entry) end
in_parts('HSET', WATCHING, round.numbers)
for at = 1, #round.grown, 2 do redis.call('HINCRBY', WATCHING, round.grown[at], round.grown[at + 1]) end
return 1
