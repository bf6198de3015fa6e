-- An operator makes a version live, or goes back to the one before.
-- KEYS model, model names
-- ARGV version, generation it was decided on, at (ISO), model name, 'promoted' | 'rolled-back'
-- returns {'published', generation} | {'changed'} (somebody was quicker)
-- invariant: compare-and-set on the generation; needs no lease, so that going back never waits for a training. The
--            newest token stays, so a trainer that lost its lease can still not publish.
local old = fields(KEYS[1])
-- The same call again, because its answer was lost.
if old.version == ARGV[1] and old.published == ARGV[3] and old.how == ARGV[5]
  and tonumber(old.generation) == tonumber(ARGV[2]) + 1 then return { 'published', tonumber(old.generation) } end
if (old.generation or '0') ~= ARGV[2] then return { 'changed' } end
return { 'published', move_pointer(KEYS[1], KEYS[2], old, ARGV[1], old.token or '0', ARGV[3], ARGV[4], ARGV[5]) }
