-- Adds objects of an archive to the plan of a backfill.
-- KEYS state, objects, pieces, open, failed
-- ARGV the struct AddArgs (sources/backfill/plans.py) as msgpack
-- returns a word per object: 'new' | 'known' | 'reopened' (pieces that had failed) | 'changed' (planned with other content)
-- invariant: an object is planned once. A piece is open, in a hand, failed or ended, never two of them.
local a = cmsgpack.unpack(ARGV[1])
local STATE, OBJECTS, PIECES, OPEN, FAILED = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local words = {}
for _, object in ipairs(a.objects) do
  local known = redis.call('HGET', OBJECTS, object.name)
  local word = 'new'
  if known and known ~= object.identity then
    word = 'changed'
  elseif known then
    word = 'known'
    for _, piece in ipairs(object.pieces) do
      if redis.call('HDEL', FAILED, piece.piece_id) == 1 then
        word = 'reopened'
        redis.call('HSET', PIECES, piece.piece_id, piece.text)
        redis.call('ZADD', OPEN, piece.rank, piece.piece_id)
      end
    end
  else
    redis.call('HSET', OBJECTS, object.name, object.identity)
    for _, piece in ipairs(object.pieces) do
      redis.call('HSET', PIECES, piece.piece_id, piece.text)
      redis.call('ZADD', OPEN, piece.rank, piece.piece_id)
      redis.call('HINCRBY', STATE, 'bytes', piece.bytes)
    end
    redis.call('HINCRBY', STATE, 'pieces', #object.pieces)
  end
  words[#words + 1] = word
end
return words
