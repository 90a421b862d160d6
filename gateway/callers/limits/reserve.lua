-- Limits that several gateways share. buckets.py has the arithmetic; this is the same, a test holds the two together.
--
-- KEYS[1]  what all keys begin with, with a hash tag: a cluster keeps them in one place
-- ARGV[1]  JSON: process, lease, step, busy, never, slack; restore (what this process holds, when it comes back);
--          gone (what it was before); settle, spent, calls: arrays of what buckets.py calls Change, (key, amount), Want
-- Returns  JSON: machines that were heard of within the lease, and of each call {lacking (0: nothing), wait, left, given}
local minute, day = 60, 86400
local KIND, KEY, LIMIT, AMOUNT, LEAST = 1, 2, 3, 4, 5
local HELD, USED = 4, 5
local prefix, asked = KEYS[1], cjson.decode(ARGV[1])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000

local processes = prefix .. ':processes'
redis.call('ZADD', processes, now, asked.process)
if asked.gone then redis.call('ZREM', processes, asked.gone) end
redis.call('ZREMRANGEBYSCORE', processes, '-inf', now - 4 * asked.lease)

local alive, machines, seen = {}, 0, {}
for _, process in ipairs(redis.call('ZRANGE', processes, now - asked.lease, '+inf', 'BYSCORE')) do
  alive[process] = true
  local machine = string.match(process, '^[^/]*')
  if not seen[machine] then
    seen[machine] = true
    machines = machines + 1
  end
end

local function key_of(want) return prefix .. ':' .. want[KIND] .. ':' .. want[KEY] end
local function spent_of(want) return prefix .. ':spent:' .. want[KEY] end

local function level_of(want)
  local kept = redis.call('GET', key_of(want))
  if not kept then return want[LIMIT], now end
  local level, stamp = string.match(kept, '^(%S+) (%S+)$')
  level, stamp = tonumber(level), tonumber(stamp)
  if now < stamp then
    if stamp - now > asked.step then stamp = now end
    return math.min(level, want[LIMIT]), stamp
  end
  return math.min(want[LIMIT], level + (now - stamp) * want[LIMIT] / minute), now
end

local function keep(want, level, stamp)
  level = math.min(want[LIMIT], level)
  local full = (want[LIMIT] - level) * minute / want[LIMIT]
  redis.call('SET', key_of(want), string.format('%.17g %.17g', level, stamp), 'PX', math.ceil(full * 1000) + 2000)
end

local function room_of(want)
  local room, held = want[LIMIT], redis.call('HGETALL', key_of(want))
  for at = 1, #held, 2 do
    if alive[held[at]] then room = room - tonumber(held[at + 1]) end
  end
  if want[KIND] == 'money' then room = room - tonumber(redis.call('GET', spent_of(want)) or 0) end
  return room
end

local function hold(want, amount)
  local key = key_of(want)
  if redis.call('HINCRBY', key, asked.process, amount) <= 0 then redis.call('HDEL', key, asked.process) end
  redis.call('EXPIRE', key, day)
end

local function wait_of(want, left)
  if want[KIND] == 'rate' then
    local missing = math.min(want[AMOUNT], want[LIMIT]) - left
    return missing > asked.slack and missing * minute / want[LIMIT] or 0
  end
  if want[KIND] == 'places' then return want[AMOUNT] > left and asked.busy or 0 end
  return want[LEAST] > left and asked.never or 0
end

for _, held in ipairs(asked.restore) do hold(held, held[AMOUNT]) end

for _, change in ipairs(asked.settle) do
  if change[KIND] == 'rate' then
    local level, stamp = level_of(change)
    keep(change, level - change[USED], stamp)
  else
    hold(change, -change[HELD])
    if change[USED] > 0 then
      redis.call('INCRBY', spent_of(change), change[USED])
      redis.call('EXPIRE', spent_of(change), 40 * day)
    end
  end
end

for _, known in ipairs(asked.spent) do
  local key = prefix .. ':spent:' .. known[1]
  if tonumber(redis.call('GET', key) or 0) < known[2] then
    redis.call('SET', key, known[2], 'EX', 40 * day)
  end
end

local replies = {}
for at, call in ipairs(asked.calls) do
  local left, given, stamps, lacking, wait = {}, {}, {}, 0, 0
  for number, want in ipairs(call) do
    if want[KIND] == 'rate' then
      left[number], stamps[number] = level_of(want)
    else
      left[number] = room_of(want)
    end
    local needed = wait_of(want, left[number])
    if needed > wait then lacking, wait = number, needed end
  end
  if lacking == 0 then
    for number, want in ipairs(call) do
      given[number] = want[KIND] == 'money' and math.min(want[AMOUNT], math.floor(left[number])) or want[AMOUNT]
      left[number] = left[number] - given[number]
      if want[KIND] == 'rate' then
        keep(want, left[number], stamps[number])
      else
        hold(want, given[number])
      end
    end
  end
  replies[at] = {lacking, wait, left, given}
end
return cjson.encode({machines, replies})
