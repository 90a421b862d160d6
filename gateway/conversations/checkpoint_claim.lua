-- Take answers of gateways whose lease has expired.
-- ARGV: the gateway that takes them, its lease in ms, the most answers.
-- Returns for each answer: id, record, cached tokens of the prompt, tokens, times taken. Values of
-- damaged keys are errors.
local prefix, gateway, lease, most = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('ZADD', prefix .. ':gateways', now + lease, gateway)
local taken = {}
for _, lost in ipairs(redis.call('ZRANGEBYSCORE', prefix .. ':gateways', '-inf', now)) do
  local theirs = prefix .. ':of:' .. lost
  for _, id in ipairs(redis.call('SPOP', theirs, most - #taken)) do
    local answer = prefix .. ':answer:' .. id
    local found = redis.pcall('HMGET', answer, 'gateway', 'end', 'record', 'cached')
    if found[1] == lost and not found[2] then
      redis.call('HSET', answer, 'gateway', gateway)
      redis.call('SADD', prefix .. ':of:' .. gateway, id)
      local times = redis.pcall('HINCRBY', answer, 'taken', 1)
      local tokens = redis.pcall('GET', prefix .. ':tokens:' .. id) or ''
      taken[#taken + 1] = {id, found[3] or false, found[4] or '', tokens, times}
    end
  end
  if redis.call('SCARD', theirs) == 0 then redis.call('ZREM', prefix .. ':gateways', lost) end
end
return taken
