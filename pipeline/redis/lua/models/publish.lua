-- Make a model version the live one of its model.
-- KEYS model, lease, model names, events
-- ARGV the struct PublishArgs (models/registry.py) as msgpack
-- returns {'published', generation} | {'stale'} | {'changed'} (somebody moved the pointer meanwhile)
-- invariant: only the live holder of the training lease moves the pointer here, checked in the same step; the
--            generation only grows; the old version's files are untouched and its name goes to the history.
local a = cmsgpack.unpack(ARGV[1])
local old = fields(KEYS[1])
-- The same call again, because its answer was lost: the history must not hold the version twice,
-- and what is live is not called lost because the lease has ended since.
if old.version == a.version and old.token == a.token then return { 'published', tonumber(old.generation) } end
local lease = fields(KEYS[2])
if lease.holder ~= a.holder or lease.token ~= a.token or tonumber(lease.deadline) <= now_ms() then return { 'stale' } end
if old.token and tonumber(old.token) > tonumber(a.token) then return { 'stale' } end
if a.expected and a.expected ~= tonumber(old.generation or '0') then return { 'changed' } end
return { 'published', move_pointer(KEYS[1], KEYS[3], KEYS[4], old, a.version, a.token, a.at, a.model, 'published') }
