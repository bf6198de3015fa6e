-- Forget a dead letter, on an operator's word; its lines are counted as discarded.
-- KEYS batch, payload, counts, dead, totals of each of its workloads
-- ARGV id, keep s, lines of each of these workloads
-- returns 1, or 0 when the batch is not dead
-- invariant: a discarded line is still counted, once.
local batch = fields(KEYS[1])
if batch.state ~= 'dead' then return 0 end
redis.call('HSET', KEYS[1], 'state', 'done', 'discarded', 1)
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('DEL', KEYS[2])
forget_dead_bytes(KEYS[3], KEYS[4], KEYS[1], batch)
if batch.kind ~= 'rescore' then
  for i = 3, #ARGV do
    redis.call('HINCRBY', KEYS[2 + i], 'dead', 0 - tonumber(ARGV[i]))
    redis.call('HINCRBY', KEYS[2 + i], 'discarded', ARGV[i])
  end
end
return 1
