-- A batch stands in the list of the unfinished ones and looks finished: take it off.
-- KEYS batch, due, in_flight
-- ARGV id
-- returns 1, or 0 when it has work after all
-- invariant: only what is finished goes; what an operator or a new model put back to work meanwhile stays, and so does a
--            stage that only a newer build knows.
local state = redis.call('HGET', KEYS[1], 'state')
if state and state ~= 'done' and state ~= 'dead' and state ~= 'split' then return 0 end
redis.call('ZREM', KEYS[3], ARGV[1])
return redis.call('ZREM', KEYS[2], ARGV[1])
