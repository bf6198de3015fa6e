-- Adds to the output of a job, or reads it. The last bytes are kept.
-- KEYS output
-- ARGV text to add, bytes to keep, seconds to keep, byte to read from (-1: nothing is read)
-- returns {number of the first byte that is returned, the bytes}
-- invariant: byte n of the whole output has number n, whatever was dropped before it.
local from = tonumber(redis.call('HGET', KEYS[1], 'from') or 0)
local text = redis.call('HGET', KEYS[1], 'text') or ''
if #ARGV[1] > 0 then
  text = text .. ARGV[1]
  local over = #text - tonumber(ARGV[2])
  if over > 0 then
    text = string.sub(text, over + 1)
    from = from + over
  end
  redis.call('HSET', KEYS[1], 'text', text, 'from', from)
  redis.call('EXPIRE', KEYS[1], ARGV[3])
end
local since = tonumber(ARGV[4])
if since < 0 then return { from, '' } end
local first = math.max(since, from)
return { first, string.sub(text, first - from + 1) }
