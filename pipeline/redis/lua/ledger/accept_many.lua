-- Takes the batches of several requests in, or those of a place in a source: all of them, or none.
-- KEYS due, counts, workloads, closed, dead, young and old identities of requests, those of records, cursors, in_flight,
--      and then batch, payload and the totals of its shares of each batch
-- ARGV the struct AcceptManyArgs (ledger/arguments.py) as msgpack, the identities of records with 16 bytes each, and then
--      the payload of each batch
-- returns {'accepted', pending batches} | {'repeated'}   these very batches are in already
--         | {'known', indices of requests that are in, indices of those that were in with another body, indices of records
--            that are in}   nothing is taken
--         | {'full', pending bytes, pending batches, reason}   as in accept.lua
--         | {'moved', cursor ('' = none)}   the cursor is not where the source says
-- invariant: an identity is in once, for at least `slot_ms` unless more than `slot_identities` came in that time. Identities
--            of requests and of records rotate together. Identities and batches are written together. The limits are those
--            of accept.lua, for all batches as one. The cursor moves exactly when the batches are in.
local a = cmsgpack.unpack(ARGV[1])
local DUE, COUNTS, WORKLOADS, CLOSED, DEAD, YOUNG, OLD = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local RECORDS_YOUNG, RECORDS_OLD, CURSORS = KEYS[8], KEYS[9], KEYS[10]
local IN_FLIGHT, keys_of, at = KEYS[11], {}, 11
for i, b in ipairs(a.batches) do
  keys_of[i] = { batch = KEYS[at + 1], payload = KEYS[at + 2], totals = {}, due = DUE, counts = COUNTS, workloads = WORKLOADS,
    dead = DEAD, in_flight = IN_FLIGHT }
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
-- Calls `use` with the number of values before and the next thousand. Lua takes at most 8,000 in one call.
local function in_chunks(list, use)
  for first = 1, #list, 1000 do use(first - 1, unpack(list, first, math.min(first + 999, #list))) end
end
local names, named, bound, records = {}, {}, {}, {}
for i, request in ipairs(a.requests) do
  if request.name ~= '' then
    names[#names + 1], named[#named + 1] = request.name, i
    bound[#bound + 1], bound[#bound + 2] = request.name, request.body
  end
end
for i = 1, #ARGV[2] / 16 do records[i] = string.sub(ARGV[2], i * 16 - 15, i * 16) end
local known, conflicts, known_records = {}, {}, {}
for _, slot in ipairs({ YOUNG, OLD }) do
  in_chunks(names, function(before, ...)
    for i, body in ipairs(redis.call('HMGET', slot, ...)) do
      local place = named[before + i]
      if body == a.requests[place].body then known[#known + 1] = place - 1
      elseif body then conflicts[#conflicts + 1] = place - 1 end
    end
  end)
end
for _, slot in ipairs({ RECORDS_YOUNG, RECORDS_OLD }) do
  if redis.call('EXISTS', slot) == 1 then
    in_chunks(records, function(before, ...)
      for i, is_known in ipairs(redis.call('SMISMEMBER', slot, ...)) do
        if is_known == 1 then known_records[#known_records + 1] = before + i - 1 end
      end
    end)
  end
end
if #known + #conflicts + #known_records > 0 then return { 'known', known, conflicts, known_records } end
local bytes, batches = pending(COUNTS)
if redis.call('EXISTS', CLOSED) == 1 then return { 'full', bytes, batches, 'closed' } end
local size, more = 0, 0
for i, b in ipairs(a.batches) do
  if not b.skip and not is_in[i] then size, more = size + #ARGV[i + 2], more + 1 end
end
local reason = more > 0 and no_room(a, COUNTS, DEAD, bytes, batches, size, more)
if reason then return { 'full', bytes, batches, reason } end
for i, b in ipairs(a.batches) do
  if not is_in[i] then
    if b.skip then
      skip_batch(b, keys_of[i], a.skip_keep_s)
    elseif b.dead ~= '' then
      bury_batch(a, b, keys_of[i], ARGV[i + 2])
      more = more - 1
    else
      take_batch(a, b, keys_of[i], ARGV[i + 2])
    end
  end
end
move_cursor()
local now = now_ms()
-- RENAME without UNLINK would free the old slot at once: 100 ms for 200,000 identities on a busy machine.
local function rotate(young, old)
  redis.call('UNLINK', old)
  if redis.call('EXISTS', young) == 1 then redis.call('RENAME', young, old) end
end
local began = tonumber(redis.call('HGET', YOUNG, '') or now)
local count = redis.call('HLEN', YOUNG) + redis.call('SCARD', RECORDS_YOUNG) + #names + #records
if now - began >= a.slot_ms or count > a.slot_identities then
  if now - began < a.slot_ms then redis.call('HINCRBY', COUNTS, 'identities_early', 1) end
  rotate(YOUNG, OLD)
  rotate(RECORDS_YOUNG, RECORDS_OLD)
end
in_chunks(bound, function(_, ...) redis.call('HSET', YOUNG, ...) end)
if #records > 0 then
  in_chunks(records, function(_, ...) redis.call('SADD', RECORDS_YOUNG, ...) end)
  redis.call('PEXPIRE', RECORDS_YOUNG, 2 * a.slot_ms)
end
if #names + #records > 0 and redis.call('HSETNX', YOUNG, '', now) == 1 then redis.call('PEXPIRE', YOUNG, 2 * a.slot_ms) end
return { 'accepted', batches + more }
