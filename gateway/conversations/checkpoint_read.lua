-- Read what answers have become, and note that they are read.
-- ARGV: ms for which they count as read, then for each answer: id, offset.
-- Returns for each: the tokens from the offset on and the end (empty unless over), or an empty list
-- if the answer is not known.
local prefix, reading = KEYS[1], tonumber(ARGV[1])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local replies = {}
for at = 2, #ARGV, 2 do
  local answer = prefix .. ':answer:' .. ARGV[at]
  local reply = {}
  if redis.call('EXISTS', answer) == 1 then
    redis.call('HSET', answer, 'read_until', now + reading)
    reply = {redis.call('GETRANGE', prefix .. ':tokens:' .. ARGV[at], ARGV[at + 1], -1),
             redis.call('HGET', answer, 'end') or ''}
  end
  replies[#replies + 1] = reply
end
return replies
