-- Write what several answers of one gateway have become since its last call, and renew its lease.
-- ARGV: the gateway, its lease in ms, then for each answer: id, record (empty unless new), cached
-- tokens of the prompt (empty if unknown), offset, tokens (bytes), end (empty unless over), "1" if the
-- gateway has taken it over.
-- Returns for each: -3 if its owner continued it elsewhere while its gateway was lost, -2 if the answer
-- is not known, or another one with its id runs, -1 if another gateway has taken it over, else the sum
-- of 1 (it shall stop) and 2 (it is read at another gateway). An answer whose keys are damaged is not
-- known.
local prefix, gateway, lease = KEYS[1], ARGV[1], tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('ZADD', prefix .. ':gateways', now + lease, gateway)
local KEEP, KEEP_ENDED, KEEP_BILLED = 3600000, 60000, 7 * 86400000
local function replaced(by, id) return prefix .. ':replaced:' .. by .. ':' .. id end
local function write(id, record, cached, offset, tokens, ended, taken)
  local answer, stored, billed = prefix .. ':answer:' .. id, prefix .. ':tokens:' .. id, prefix .. ':billed:' .. id
  local owner, over = unpack(redis.call('HMGET', answer, 'gateway', 'end'))
  -- an answer that continues a message has the id of the one before; a record of up to a megabyte is
  -- not read for each token
  local before = record ~= '' and redis.call('HGET', answer, 'record')
  local other = before and record ~= before
  -- a lost gateway's answer, which no gateway has taken over yet, must not go on beside its continuation
  local lost = owner and tonumber(redis.call('ZSCORE', prefix .. ':gateways', owner) or 0) <= now
  if other and (over or lost) then
    redis.call('DEL', answer, stored)
    if not over then redis.call('SET', replaced(owner, id), '1', 'PX', KEEP_BILLED) end
    owner, other = false, false
  end
  if not owner and record ~= '' then
    redis.call('DEL', billed, replaced(gateway, id))
    redis.call('HSET', answer, 'gateway', gateway, 'began', gateway, 'record', record, 'taken', 0)
    redis.call('SADD', prefix .. ':of:' .. gateway, id)
    owner = gateway
  end
  if not owner and taken ~= '' then
    -- Redis has lost it: the gateway that began it must not bill its part instead of the whole
    redis.call('SET', billed, '1', 'PX', KEEP_BILLED)
  end
  if owner ~= gateway and record == '' then
    if redis.call('EXISTS', replaced(gateway, id)) == 1 then return -3 end
    -- taken over from this gateway, and ended more than a minute ago
    if not owner and redis.call('GET', billed) == gateway then return -1 end
  end
  if other or owner ~= gateway then return owner and not other and -1 or -2 end
  if cached ~= '' then redis.call('HSET', answer, 'cached', cached) end
  if tokens ~= '' then redis.call('SETRANGE', stored, offset, tokens) end
  local keep = KEEP
  if ended ~= '' then
    keep = KEEP_ENDED
    redis.call('HSET', answer, 'end', ended)
    redis.call('SREM', prefix .. ':of:' .. gateway, id)
    if redis.call('HGET', answer, 'taken') ~= '0' then
      redis.call('SET', billed, redis.call('HGET', answer, 'began') or '1', 'PX', KEEP_BILLED)
    end
  end
  redis.call('PEXPIRE', answer, keep)
  redis.call('PEXPIRE', stored, keep)
  local flags = redis.call('HMGET', answer, 'stop', 'read_until')
  return (flags[1] and 1 or 0) + ((flags[2] and tonumber(flags[2]) > now) and 2 or 0)
end
local replies = {}
for at = 3, #ARGV, 7 do
  local fine, reply = pcall(write, unpack(ARGV, at, at + 6))
  replies[#replies + 1] = fine and reply or -2
end
return replies
