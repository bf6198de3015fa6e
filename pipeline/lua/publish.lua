-- Make a model version the live one.
-- KEYS model, lease
-- ARGV version, holder, token, published at (ISO)
-- returns {'published', generation} | {'stale'}
-- invariant: only the live holder of the training lease moves the pointer, checked in the same step; the
--            generation only grows; the old version's files are untouched.
local lease = fields(KEYS[2])
if lease.holder ~= ARGV[2] or lease.token ~= ARGV[3] or tonumber(lease.deadline) <= now_ms() then return { 'stale' } end
local old = redis.call('HMGET', KEYS[1], 'version', 'token', 'generation')
if old[2] and tonumber(old[2]) > tonumber(ARGV[3]) then return { 'stale' } end
-- The same call again, because its answer was lost: 'previous' must not become the version itself.
if old[1] == ARGV[1] and old[2] == ARGV[3] then return { 'published', tonumber(old[3]) } end
local generation = redis.call('HINCRBY', KEYS[1], 'generation', 1)
redis.call('HSET', KEYS[1], 'version', ARGV[1], 'token', ARGV[3],
  'published', ARGV[4], 'previous', old[1] or '')
return { 'published', generation }
