-- What a slot was for is done.
-- KEYS slots
-- ARGV schedule, seq, nominal ms
-- returns 1, or 0 when the slot was taken over meanwhile: whoever has it finishes it
-- invariant: only the newest owner finishes; being late alone loses nothing, the work is done.
local function field(name) return ARGV[1] .. '|' .. name end
local row = redis.call('HMGET', KEYS[1], field('seq'), field('owner'))
if row[1] ~= ARGV[2] or (row[2] or '') == '' then return 0 end
redis.call('HSET', KEYS[1], field('done'), ARGV[3], field('owner'), '', field('deadline'), 0)
return 1
