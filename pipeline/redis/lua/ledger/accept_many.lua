-- Takes the batches of several requests in, or those of a place in a source: all of them, or none.
-- KEYS due, counts, workloads, closed, dead, young and old identities, cursors, and then batch, payload and the totals of
--      its shares of each batch
-- ARGV the struct AcceptManyArgs (ledger/arguments.py) as msgpack, and then the payload of each batch
-- returns {'accepted', pending batches} | {'repeated'}   these very batches are in already
--         | {'known', indices of requests that are in, indices of those that were in with another body}   nothing is taken
--         | {'full', pending bytes, pending batches, reason}   as in accept.lua
--         | {'moved', cursor ('' = none)}   the cursor is not where the source says
-- invariant: an identity is in once, for at least `slot_ms` unless more than `slot_identities` came in that time. Identities and
--            batches are written together. The limits are those of accept.lua, for all batches as one. The cursor moves
--            exactly when the batches are in.
local a = cmsgpack.unpack(ARGV[1])
local DUE, COUNTS, WORKLOADS, CLOSED, DEAD, YOUNG, OLD = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local CURSORS = KEYS[8]
local keys_of, at = {}, 8
for i, b in ipairs(a.batches) do
  keys_of[i] = { batch = KEYS[at + 1], payload = KEYS[at + 2], totals = {}, due = DUE, counts = COUNTS, workloads = WORKLOADS,
    dead = DEAD }
  for j = 1, #b.shares do keys_of[i].totals[j] = KEYS[at + 2 + j] end
  at = at + 2 + #b.shares
end
-- Requests: all batches were written together, or none. A source that an operator set back may have some of them in.
local is_in, unknown = {}, 0
for i, b in ipairs(a.batches) do
  is_in[i] = redis.call('HGET', keys_of[i].batch, 'hash') == b.content
  if not is_in[i] then unknown = unknown + 1 end
end
if a.cursor then
  local position = redis.call('HGET', CURSORS, a.cursor_key) or ''
  -- The cursor stands behind its own batches when only the answer was lost.
  if position ~= a.after and not (position == a.cursor and unknown == 0) then return { 'moved', position } end
end
local function move_cursor()
  if a.cursor then redis.call('HSET', CURSORS, a.cursor_key, a.cursor) end
end
if unknown == 0 then
  move_cursor()
  return { 'repeated' }
end
local known, conflicts = {}, {}
for i, request in ipairs(a.requests) do
  if request.name ~= '' then
    local body = redis.call('HGET', YOUNG, request.name) or redis.call('HGET', OLD, request.name)
    if body then
      if body == request.body then known[#known + 1] = i - 1 else conflicts[#conflicts + 1] = i - 1 end
    end
  end
end
if #known + #conflicts > 0 then return { 'known', known, conflicts } end
local bytes, batches = pending(COUNTS)
if redis.call('EXISTS', CLOSED) == 1 then return { 'full', bytes, batches, 'closed' } end
local size, more = 0, 0
for i, b in ipairs(a.batches) do
  if not b.skip and not is_in[i] then size, more = size + #ARGV[i + 1], more + 1 end
end
local reason = more > 0 and no_room(a, COUNTS, DEAD, bytes, batches, size, more)
if reason then return { 'full', bytes, batches, reason } end
for i, b in ipairs(a.batches) do
  if not is_in[i] then
    if b.skip then
      skip_batch(b, keys_of[i], a.skip_keep_s)
    elseif b.dead ~= '' then
      bury_batch(a, b, keys_of[i], ARGV[i + 1])
      more = more - 1
    else
      take_batch(a, b, keys_of[i], ARGV[i + 1])
    end
  end
end
move_cursor()
local now = now_ms()
local began = tonumber(redis.call('HGET', YOUNG, '') or now)
if now - began >= a.slot_ms or redis.call('HLEN', YOUNG) + #a.requests > a.slot_identities then
  if now - began < a.slot_ms then redis.call('HINCRBY', COUNTS, 'identities_early', 1) end
  if redis.call('EXISTS', YOUNG) == 1 then redis.call('RENAME', YOUNG, OLD) end
end
for _, request in ipairs(a.requests) do
  if request.name ~= '' then redis.call('HSET', YOUNG, request.name, request.body) end
end
if redis.call('EXISTS', YOUNG) == 1 and redis.call('HSETNX', YOUNG, '', now) == 1 then
  redis.call('PEXPIRE', YOUNG, 2 * a.slot_ms)
end
return { 'accepted', batches + more }
