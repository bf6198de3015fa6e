-- Moves the cursor of a source over a stretch without batches: its first place, records that nobody can read any more.
-- KEYS cursors, counts
-- ARGV the struct MoveCursorArgs (ledger/arguments.py) as msgpack
-- returns the cursor that stands now
-- invariant: compare-and-set; `lost` is counted exactly when the cursor moves.
local a = cmsgpack.unpack(ARGV[1])
local position = redis.call('HGET', KEYS[1], a.cursor_key) or ''
if position ~= a.after then return position end
redis.call('HSET', KEYS[1], a.cursor_key, a.cursor)
if a.lost > 0 then redis.call('HINCRBY', KEYS[2], 'source_lost', a.lost) end
return a.cursor
