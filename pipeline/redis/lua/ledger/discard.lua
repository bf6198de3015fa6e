-- Forget a dead letter, on an operator's word; its lines are counted as discarded.
-- KEYS batch, payload, totals, dead, counts
-- ARGV id, keep s
-- returns 1, or 0 when the batch is not dead
-- invariant: a discarded line is still counted, once.
local batch = fields(KEYS[1])
if batch.state ~= 'dead' then return 0 end
redis.call('HSET', KEYS[1], 'state', 'done', 'discarded', 1)
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('DEL', KEYS[2])
forget_dead_bytes(KEYS[5], KEYS[4], KEYS[1], batch)
if batch.kind ~= 'rescore' then
  redis.call('HINCRBY', KEYS[3], 'dead', 0 - tonumber(batch.lines))
  redis.call('HINCRBY', KEYS[3], 'discarded', batch.lines)
end
return 1
