-- Report the progress of a training.
-- KEYS training
-- ARGV the struct ShowArgs (controller/arguments.py) as msgpack
-- returns 'ok' | 'cancel' (somebody asked for its end) | 'lost' (it is not the caller's)
-- invariant: a process that lost the training changes nothing.
local a = cmsgpack.unpack(ARGV[1])
local training = fields(KEYS[1])
if training.token ~= a.token or training.ended_ms then return 'lost' end
if training.cancel then return 'cancel' end
redis.call('HSET', KEYS[1], 'state', a.state, 'status', a.status)
return 'ok'
