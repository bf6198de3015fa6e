-- Whether a value has changed, without sending it.
-- KEYS a string
-- returns its SHA-1 in 40 hexadecimal digits | '' where there is none
-- invariant: it only reads.
local value = redis.call('GET', KEYS[1])
return value and redis.sha1hex(value) or ''
