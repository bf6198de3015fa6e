-- A need goes on waiting.
-- KEYS as in gpu/_gpu.lua
-- ARGV request, ms to remember it for
-- returns 1, or 0 when it does not wait any more: its holder then asks with gpu/wait.lua
-- invariant: no need begins to wait by this.
if redis.call('HEXISTS', WAITING, ARGV[1]) == 0 then return 0 end
redis.call('ZADD', WAITING_UNTIL, whole(now + tonumber(ARGV[2])), ARGV[1])
return 1
