-- Change the watchlist.
-- KEYS watch (hash: pattern -> JSON; the field '' is the version)
-- ARGV 'add' | 'remove', most patterns, then patterns
-- returns {'done', patterns that changed ...} | {'full'} (nothing was changed)
-- invariant: the version grows by one exactly when the list changes.
local changed = { 'done' }
local now = now_ms()
if ARGV[1] == 'add' then
  local new = 0
  for i = 3, #ARGV do new = new + 1 - redis.call('HEXISTS', KEYS[1], ARGV[i]) end
  if redis.call('HLEN', KEYS[1]) - redis.call('HEXISTS', KEYS[1], '') + new > tonumber(ARGV[2]) then return { 'full' } end
  for i = 3, #ARGV do
    local entry = '{"added_ms":' .. string.format('%.0f', now) .. '}'
    if redis.call('HSETNX', KEYS[1], ARGV[i], entry) == 1 then changed[#changed + 1] = ARGV[i] end
  end
else
  for i = 3, #ARGV do
    if ARGV[i] ~= '' and redis.call('HDEL', KEYS[1], ARGV[i]) == 1 then changed[#changed + 1] = ARGV[i] end
  end
end
if #changed > 1 then redis.call('HINCRBY', KEYS[1], '', 1) end
return changed
