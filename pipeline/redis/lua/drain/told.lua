-- Templates were told to the OpenSearch index.
-- KEYS templates to be told
-- ARGV pairs of template id and the number of changes that were told
-- returns how many are done with
-- invariant: a template that changed again meanwhile stays.
local done = 0
for i = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then done = done + redis.call('HDEL', KEYS[1], ARGV[i]) end
end
return done
