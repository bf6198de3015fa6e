-- What came of lines that evidence_ask gave out.
-- KEYS young, old
-- ARGV limit of the young half, ttl s, then pairs of field and evidence ('' = none: whoever asks next scores the line)
-- returns 1
-- invariant: as evidence_ask. Whoever told it: the evidence of a line under a version is always the same.
for i = 3, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
    redis.call('HDEL', KEYS[2], ARGV[i])
  else
    if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[1]) then redis.call('RENAME', KEYS[1], KEYS[2]) end
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[2])
return 1
