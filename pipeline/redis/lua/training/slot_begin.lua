-- Take the current slot of a schedule.
-- KEYS slots
-- ARGV the struct BeginArgs (controller/schedule.py) as msgpack
-- returns {'yours', nominal ms, seq, slots missed since the last one that was done} | {'done', ms until the next}
--         | {'running', ms until it may be taken over}
-- invariant: one unexpired owner per schedule, and a slot that is done is not given again. Only the latest slot is
--            ever given, so whatever was missed is caught up once. A slot becomes done in training/slot_finish.lua alone.
--            A clock that stepped back a little waits until it is there again; one that stepped back further was
--            wrong before, and what it has left behind does not count.
local a = cmsgpack.unpack(ARGV[1])
local function field(name) return a.name .. '|' .. name end
local now, every, ttl = now_ms(), a.every_ms, a.ttl_ms
local nominal = now - now % every
local row = redis.call('HMGET', KEYS[1], field('done'), field('owner'), field('deadline'))
local done, owner, deadline = tonumber(row[1] or '-1'), row[2] or '', tonumber(row[3] or '0')
if done - nominal > a.step_back_ms then done = -1 end
if done >= nominal then return { 'done', done + every - now } end
-- No deadline lies further ahead than one ttl, but by a clock that was wrong.
if owner ~= '' and deadline > now and deadline - now <= ttl then return { 'running', deadline - now } end
local seq = redis.call('HINCRBY', KEYS[1], field('seq'), 1)
redis.call('HSET', KEYS[1], field('owner'), a.owner, field('deadline'), now + ttl)
local missed = 0
if done >= 0 then missed = math.max(0, math.ceil((nominal - done) / every) - 1) end
return { 'yours', nominal, seq, missed }
