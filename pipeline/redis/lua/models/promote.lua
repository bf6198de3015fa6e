-- An operator makes a version live, or goes back to the one before.
-- KEYS model, model names, events
-- ARGV the struct PromoteArgs (models/registry.py) as msgpack
-- returns {'published', generation} | {'changed'} (somebody was quicker)
-- invariant: compare-and-set on the generation; needs no lease, so that going back never waits for a training. The
--            newest token stays, so a trainer that lost its lease can still not publish.
local a = cmsgpack.unpack(ARGV[1])
local old = fields(KEYS[1])
-- The same call again, because its answer was lost.
if old.version == a.version and old.published == a.at and old.how == a.how
  and tonumber(old.generation) == a.generation + 1 then return { 'published', tonumber(old.generation) } end
if tonumber(old.generation or '0') ~= a.generation then return { 'changed' } end
return { 'published', move_pointer(KEYS[1], KEYS[2], KEYS[3], old, a.version, old.token or '0', a.at, a.model, a.how) }
