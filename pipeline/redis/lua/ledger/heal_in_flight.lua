-- Makes in_flight hold the batches that due holds. An earlier build wrote due alone, and it may work beside this one.
-- KEYS due, in_flight
-- ARGV ids and scores by turns, '' for a batch that has ended
-- returns how many entries changed
-- invariant: due decides. What was accepted or ended since the caller looked stays as its own script left it.
local changed = 0
for at = 1, #ARGV, 2 do
  local id, score = ARGV[at], ARGV[at + 1]
  local unfinished = redis.call('ZSCORE', KEYS[1], id)
  if score == '' and not unfinished then
    changed = changed + redis.call('ZREM', KEYS[2], id)
  elseif score ~= '' and unfinished then
    changed = changed + redis.call('ZADD', KEYS[2], 'NX', score, id)
  end
end
return changed
