-- Make a model version the live one of its model.
-- KEYS model, lease, model names
-- ARGV version, holder, token, published at (ISO), model name, generation it was judged against ('' = any)
-- returns {'published', generation} | {'stale'} | {'changed'} (somebody moved the pointer meanwhile)
-- invariant: only the live holder of the training lease moves the pointer here, checked in the same step; the
--            generation only grows; the old version's files are untouched and its name goes to the history.
local old = fields(KEYS[1])
-- The same call again, because its answer was lost: the history must not hold the version twice,
-- and what is live is not called lost because the lease has ended since.
if old.version == ARGV[1] and old.token == ARGV[3] then return { 'published', tonumber(old.generation) } end
local lease = fields(KEYS[2])
if lease.holder ~= ARGV[2] or lease.token ~= ARGV[3] or tonumber(lease.deadline) <= now_ms() then return { 'stale' } end
if old.token and tonumber(old.token) > tonumber(ARGV[3]) then return { 'stale' } end
if ARGV[6] ~= '' and ARGV[6] ~= (old.generation or '0') then return { 'changed' } end
return { 'published', move_pointer(KEYS[1], KEYS[3], old, ARGV[1], ARGV[3], ARGV[4], ARGV[5], 'published') }
