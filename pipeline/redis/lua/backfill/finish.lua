-- Ends the reading of a piece, or only looks whether the plan has ended (piece_id '').
-- KEYS lease of the slot, state, pieces, open, hands, tries, failed, notes, reading, objects, borders
-- ARGV the struct EndPieceArgs (sources/backfill/plans.py) as msgpack
-- returns 'ended' (nothing is left of the plan) | 'going' | 'stale' (the piece is not in the hand of this reader)
-- invariant: a piece is counted once. A plan that has ended is forgotten after keep_s.
local a = cmsgpack.unpack(ARGV[1])
local LEASE, STATE, PIECES, OPEN, HANDS, TRIES = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local FAILED, NOTES, READING = KEYS[7], KEYS[8], KEYS[9]
local now = now_ms()
if a.piece_id ~= '' then
  local lease = fields(LEASE)
  if lease.holder ~= a.holder or lease.token ~= a.token or tonumber(lease.deadline) <= now then return 'stale' end
  if redis.call('HGET', HANDS, a.slot) ~= a.piece_id then return 'stale' end
  redis.call('HDEL', HANDS, a.slot)
  redis.call('HDEL', READING, a.slot)
  if a.fate == 'back' then
    -- Behind all others, so that they go on meanwhile.
    local last = redis.call('ZRANGE', OPEN, -1, -1, 'WITHSCORES')
    redis.call('ZADD', OPEN, (tonumber(last[2]) or 0) + 1, a.piece_id)
    if a.untried then redis.call('HINCRBY', TRIES, a.piece_id, -1) end
  else
    redis.call('HDEL', PIECES, a.piece_id)
    redis.call('HDEL', TRIES, a.piece_id)
    redis.call('HINCRBY', STATE, 'lines', a.lines)
    if a.fate == 'failed' then
      redis.call('HSET', FAILED, a.piece_id, a.failure)
    else
      redis.call('HINCRBY', STATE, a.fate, 1)
      redis.call('HINCRBY', STATE, 'bytes_ended', a.bytes)
    end
  end
  for _, note in ipairs(a.notes) do redis.call('RPUSH', NOTES, note) end
  redis.call('LTRIM', NOTES, 0, a.most_notes - 1)
end
if redis.call('HGET', STATE, 'planned') ~= '1' then return 'going' end
if redis.call('ZCARD', OPEN) > 0 or redis.call('HLEN', HANDS) > 0 then return 'going' end
redis.call('HSETNX', STATE, 'ended_ms', now)
for i = 2, #KEYS do redis.call('EXPIRE', KEYS[i], a.keep_s) end
return 'ended'
