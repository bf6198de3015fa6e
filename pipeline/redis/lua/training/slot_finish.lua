-- What a slot was for is done.
-- KEYS slots
-- ARGV the struct FinishArgs (controller/schedule.py) as msgpack
-- returns 1, or 0 when the slot was taken over meanwhile: whoever has it finishes it
-- invariant: only the newest owner finishes; being late alone loses nothing, the work is done.
local a = cmsgpack.unpack(ARGV[1])
local function field(name) return a.name .. '|' .. name end
local row = redis.call('HMGET', KEYS[1], field('seq'), field('owner'))
if row[1] ~= a.seq or (row[2] or '') == '' then return 0 end
redis.call('HSET', KEYS[1], field('done'), a.nominal_ms, field('owner'), '', field('deadline'), 0)
return 1
