-- Compare-and-set of a job's record.
-- KEYS jobs that live, jobs that ended
-- ARGV id, the text that was read ('': none), the new text, '1' when the job has ended with it
-- returns 1, or 0 when the record is another one by now
-- invariant: a job is in one of the two hashes, and one that has ended never changes.
local before = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if before ~= ARGV[2] or redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then return 0 end
if ARGV[4] == '1' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
return 1
