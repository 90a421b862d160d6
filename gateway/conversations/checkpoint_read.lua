-- Read what answers have become, and note that they are read.
-- ARGV: ms for which they count as read, then for each answer: id, offset.
-- Returns for each: the tokens from the offset on and the end (empty unless over), or an empty list
-- if the answer is not known, or its keys are damaged.
local prefix, reading = KEYS[1], tonumber(ARGV[1])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function read(id, offset)
  local answer = prefix .. ':answer:' .. id
  if redis.call('EXISTS', answer) == 0 then return {} end
  redis.call('HSET', answer, 'read_until', now + reading)
  return {redis.call('GETRANGE', prefix .. ':tokens:' .. id, offset, -1), redis.call('HGET', answer, 'end') or ''}
end
local replies = {}
for at = 2, #ARGV, 2 do
  local fine, reply = pcall(read, ARGV[at], ARGV[at + 1])
  replies[#replies + 1] = fine and reply or {}
end
return replies
