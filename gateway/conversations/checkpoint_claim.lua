-- Take answers of gateways whose lease has expired.
-- ARGV: the gateway that takes them, its lease in ms, the most answers, and the bytes after which no
-- further answer is taken. If the gateway lost the reply of an earlier call also "1" and the ids of all
-- answers that it knows: it gets the others that it took again.
-- Returns for each answer: id, record, cached tokens of the prompt, tokens, times taken. Values of
-- damaged keys are errors.
local prefix, gateway, lease, most, bytes = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('ZADD', prefix .. ':gateways', now + lease, gateway)
if ARGV[5] then
  local own, unheard, known = prefix .. ':of:' .. gateway, gateway .. ':unheard', {}
  for at = 6, #ARGV do known[ARGV[at]] = true end
  for _, id in ipairs(redis.call('SMEMBERS', own)) do
    if not known[id] and redis.pcall('HGET', prefix .. ':answer:' .. id, 'gateway') == gateway then
      redis.call('SMOVE', own, prefix .. ':of:' .. unheard, id)
      redis.call('HSET', prefix .. ':answer:' .. id, 'gateway', unheard)
      redis.call('ZADD', prefix .. ':gateways', 0, unheard)
    end
  end
end
local taken, size = {}, 0
for _, lost in ipairs(redis.call('ZRANGEBYSCORE', prefix .. ':gateways', '-inf', now)) do
  local theirs = prefix .. ':of:' .. lost
  while #taken < most and size < bytes do
    local id = redis.call('SPOP', theirs)
    if not id then break end
    local answer = prefix .. ':answer:' .. id
    local found = redis.pcall('HMGET', answer, 'gateway', 'end', 'record', 'cached')
    if found[1] == lost and not found[2] then
      redis.call('HSET', answer, 'gateway', gateway)
      redis.call('SADD', prefix .. ':of:' .. gateway, id)
      local times = redis.pcall('HINCRBY', answer, 'taken', 1)
      local tokens = redis.pcall('GET', prefix .. ':tokens:' .. id) or ''
      size = size + #(found[3] or '') + #tokens
      taken[#taken + 1] = {id, found[3] or false, found[4] or '', tokens, times}
    end
  end
  if redis.call('SCARD', theirs) == 0 then redis.call('ZREM', prefix .. ':gateways', lost) end
end
return taken
