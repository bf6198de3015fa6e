-- Gives the reader of a slot a piece: the one that is in the slot's hand, else the next open one.
-- KEYS lease of the slot, state, pieces, open, hands, tries
-- ARGV the struct TakePieceArgs (sources/backfill/plans.py) as msgpack
-- returns {'piece', id, text, tries without progress} | {'nothing'} | {'cancelled'} | {'stale'} (the lease is not the caller's)
-- invariant: a slot has at most one piece in its hand, and a piece lies in at most one hand.
local a = cmsgpack.unpack(ARGV[1])
local LEASE, STATE, PIECES, OPEN, HANDS, TRIES = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local lease = fields(LEASE)
if lease.holder ~= a.holder or lease.token ~= a.token or tonumber(lease.deadline) <= now_ms() then return { 'stale' } end
local state = fields(STATE)
if state.state ~= 'active' then return { 'cancelled' } end
local piece = redis.call('HGET', HANDS, a.slot)
if not piece then
  if tonumber(a.slot) >= tonumber(state.parallel) then return { 'nothing' } end
  piece = redis.call('ZPOPMIN', OPEN)[1]
  if not piece then return { 'nothing' } end
  redis.call('HSET', HANDS, a.slot, piece)
end
return { 'piece', piece, redis.call('HGET', PIECES, piece) or '', redis.call('HINCRBY', TRIES, piece, 1) }
