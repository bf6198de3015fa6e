-- Report the progress of a training.
-- KEYS training
-- ARGV token, state, status (JSON)
-- returns 'ok' | 'cancel' (somebody asked for its end) | 'lost' (it is not the caller's)
-- invariant: a process that lost the training changes nothing.
local training = fields(KEYS[1])
if training.token ~= ARGV[1] or training.ended_ms then return 'lost' end
if training.cancel then return 'cancel' end
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'status', ARGV[3])
return 'ok'
