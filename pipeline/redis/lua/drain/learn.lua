-- The learner's write: templates and verdicts together, refused to a learner that lost its lease.
-- KEYS lease, templates, template counts, young verdicts, old verdicts, templates_untold, templates_journal
-- ARGV the struct LearnArgs (drain/verdicts.py) as msgpack
-- returns 1, or 0 when the token is not the holder's
-- invariant: a template id once written is never given to another template. The cache holds at most `limit` verdicts:
--            a full young generation becomes the old one (two-generation LRU).
local a = cmsgpack.unpack(ARGV[1])
local LEASE, TEMPLATES, COUNTS, YOUNG, OLD, UNTOLD, JOURNAL = unpack(KEYS)
if a.token ~= '' then
  local lease = redis.call('HMGET', LEASE, 'token', 'deadline')
  if lease[1] ~= a.token or tonumber(lease[2] or '0') <= now_ms() then return 0 end
end
-- Another learner may have given the same id meanwhile. The caller then reads everything back and continues above it.
for _, template in ipairs(a.templates) do
  local stored = template.workload ~= '' and redis.call('HGET', TEMPLATES, template.id)
  if stored and stored ~= template.packed then return 0 end
end
for _, template in ipairs(a.templates) do
  -- Redis may run a script again whose answer was lost, so only the first write of an id counts.
  local first = redis.call('HSET', TEMPLATES, template.id, template.packed) == 1
  if first and template.workload ~= '' then redis.call('HINCRBY', COUNTS, template.workload, 1) end
  if a.tell then redis.call('HINCRBY', UNTOLD, template.id, 1) end
end
if a.journal ~= '' then redis.call('SET', JOURNAL, a.journal) end
if #a.verdicts > 0 then
  local half = math.max(1, math.floor(a.limit / 2))
  for i = 1, #a.verdicts, 2 do
    if redis.call('HLEN', YOUNG) >= half then redis.call('RENAME', YOUNG, OLD) end
    redis.call('HSET', YOUNG, a.verdicts[i], a.verdicts[i + 1])
  end
  redis.call('EXPIRE', YOUNG, a.ttl_s)
  redis.call('EXPIRE', OLD, a.ttl_s)
end
return 1
