-- Takes a batch in: payload, ledger entry and source cursor in one step.
-- KEYS batch, payload, due, counts, workloads, totals, cursors, closed, dead, in_flight
-- ARGV the struct AcceptArgs (ledger/arguments.py) as msgpack, payload
-- returns {'accepted', pending batches} | {'skipped'} | {'duplicate', state} | {'conflict'}
--         | {'full', pending bytes, pending batches, reason}   reason: closed, dead, memory, bytes or batches
--         | {'moved', cursor ('' = none)}   the cursor is not where the source says
-- invariant: an id is accepted once. Pending bytes and batches stay under their limits, and Redis under its part of
--            memory, unless nothing waits. Backfill leaves room for fresh batches. A closed gate and full dead letters
--            take nothing in. The cursor moves exactly when its batch is in.
local a = cmsgpack.unpack(ARGV[1])
local keys = { batch = KEYS[1], payload = KEYS[2], due = KEYS[3], counts = KEYS[4], workloads = KEYS[5], totals = { KEYS[6] },
  in_flight = KEYS[10] }
local CURSORS, CLOSED, DEAD = KEYS[7], KEYS[8], KEYS[9]
local function move_cursor()
  if a.cursor then redis.call('HSET', CURSORS, a.cursor_key, a.cursor) end
end
local known = redis.call('HMGET', keys.batch, 'hash', 'state')
if a.after then
  local position = redis.call('HGET', CURSORS, a.cursor_key) or ''
  -- The cursor stands behind its own batch when only the answer was lost.
  if position ~= a.after and not (position == (a.cursor or '') and known[1] == a.content) then
    return { 'moved', position }
  end
end
if known[1] then
  if known[1] ~= a.content then return { 'conflict' } end
  move_cursor()
  return { 'duplicate', known[2] }
end
local bytes, batches = pending(keys.counts)
if redis.call('EXISTS', CLOSED) == 1 then return { 'full', bytes, batches, 'closed' } end
if a.skip_keep_s then
  skip_batch(a, keys, a.skip_keep_s)
  move_cursor()
  return { 'skipped' }
end
local reason = no_room(a, keys.counts, DEAD, bytes, batches, #ARGV[2], 1)
if reason then return { 'full', bytes, batches, reason } end
take_batch(a, a, keys, ARGV[2])
move_cursor()
return { 'accepted', batches + 1 }
