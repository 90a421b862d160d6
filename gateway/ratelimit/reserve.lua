-- Limits that several gateways share. This script has the same arithmetic as buckets.py; a test compares the two.
--
-- KEYS[1]  The prefix of all keys, with a hash tag, so that a cluster keeps the keys on one node.
-- ARGV[1]  A JSON object:
--          process   the name of the calling process
--          gone      the former name of the process, empty if it has none
--          lease     seconds after which a silent process loses what it holds
--          step, busy, never, slack, nolimit   the constants of buckets.py
--          silence   seconds after a loss of data within which each process restores what it holds
--          restore   what the process holds, after a reconnection: arrays of a Limit's values and a Settlement's values
--          settle    settlements, in the same format
--          spent     arrays of a Limit's values and the minimum that was spent of it before `settle`
--          held      arrays of a Limit's values, and the slots and money that the process holds of it after `settle`
--          calls     one array per reservation, of arrays of a Limit's values and a LimitRequest's values
-- Returns  A JSON array: the number of gateways that called within the lease, the name of the stored data (`epoch`),
--          what was spent of each budget (arrays of name and {period, amount}), and for each call
--          {lacking (0: granted), of ('loss': ask again after the wait), wait, money, what each limit has left}
local minute, hour, day = 60, 3600, 86400
-- the ordinal of 1970-01-01
local EPOCH = 719163
local NAME, REQUESTS, TOKENS, PLACES, MONEY, PERIOD = 1, 2, 3, 4, 5, 6
-- positions of the values that follow a limit's values
local ASKED, COUNTED, OPEN, HELD, LEAST, PAID, AMOUNT = 7, 8, 9, 10, 11, 11, 7
local WHAT = {'requests', 'tokens', 'places', 'money'}
local prefix, asked = KEYS[1], cjson.decode(ARGV[1])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
-- the ordinal of the latest day on which a period may have begun: a gateway that names a later day has a wrong clock
local latest = math.floor((now + hour) / day) + EPOCH

local processes = prefix .. ':processes'
-- the name of the stored data: another name means that the earlier data is lost. It ends with the time of the loss.
local epoch = redis.call('GET', prefix .. ':epoch')
local lost_at = epoch and tonumber(string.match(epoch, '/(%d+%.%d+)$'))

-- each gateway restores what it holds, and reads the ledger
local function report_loss()
  lost_at = now
  epoch = string.format('%s/%.6f', asked.process, now)
  redis.call('SET', prefix .. ':epoch', epoch)
end

if not lost_at or lost_at > now then report_loss() end
redis.call('ZADD', processes, now, asked.process)
if asked.gone ~= '' then redis.call('ZREM', processes, asked.gone) end
redis.call('ZREMRANGEBYSCORE', processes, '-inf', now - 4 * asked.lease)

-- by process: true if it called within the lease
local alive, gateways = {}, 0
local heard = redis.call('ZRANGE', processes, 0, -1, 'WITHSCORES')
for at = 1, #heard, 2 do
  local process, lives = heard[at], tonumber(heard[at + 1]) >= now - asked.lease
  alive[process] = lives
  if lives then gateways = gateways + 1 end
end

-- each record is read once and written once
local records, changed = {}, {}

local function refilled(level, elapsed, limit) return math.min(limit, level + elapsed * limit / minute) end

local function is_number(value) return type(value) == 'number' and math.abs(value) <= asked.nolimit end

-- the record that was kept under a name, or nil for none. A damaged record is a loss of data.
local function kept_record(name)
  local kept = redis.pcall('GET', prefix .. ':' .. name)
  if not kept then return nil end
  local readable, record = pcall(cmsgpack.unpack, kept)
  if readable and type(record) == 'table' and type(record.held) == 'table' then
    local whole = is_number(record.stamp) and is_number(record.requests) and is_number(record.tokens)
    whole = whole and is_number(record.spent) and record.spent >= 0
    whole = whole and is_number(record.period) and record.period <= latest
    for _, held in pairs(record.held) do
      whole = whole and type(held) == 'table' and is_number(held[1]) and is_number(held[2])
    end
    if whole then return record end
  end
  report_loss()
  return nil
end

local function record_of(bound)
  local name = bound[NAME]
  local record = records[name]
  if not record then
    record = kept_record(name) or {
      stamp = now, requests = bound[REQUESTS], tokens = bound[TOKENS], spent = 0,
      period = math.min(bound[PERIOD], latest), held = {}
    }
    records[name] = record
  end
  local elapsed = now - record.stamp
  if elapsed >= 0 or elapsed < -asked.step then record.stamp = now end
  elapsed = math.max(elapsed, 0)
  record.requests = refilled(record.requests, elapsed, bound[REQUESTS])
  record.tokens = refilled(record.tokens, elapsed, bound[TOKENS])
  if record.period < bound[PERIOD] and bound[PERIOD] <= latest then record.spent, record.period = 0, bound[PERIOD] end
  return record
end

local function left_of(record, bound)
  local places, money = bound[PLACES], bound[MONEY] - record.spent
  for process, held in pairs(record.held) do
    if alive[process] then
      places, money = places - held[1], money - held[2]
    elseif alive[process] == nil then
      record.held[process] = nil
    end
  end
  return {record.requests, record.tokens, places, money}
end

local function use(record, bound, requests, tokens, places, money, spent)
  record.requests = math.min(bound[REQUESTS], record.requests - requests)
  record.tokens = math.min(bound[TOKENS], record.tokens - tokens)
  record.spent = record.spent + spent
  if bound[PLACES] < asked.nolimit or bound[MONEY] < asked.nolimit then
    local held = record.held[asked.process] or {0, 0}
    held = {math.max(held[1] + places, 0), math.max(held[2] + money, 0)}
    record.held[asked.process] = held[1] + held[2] > 0 and held or nil
  end
  changed[bound[NAME]] = bound
end

local function until_of(amount, level, limit)
  local missing = math.min(amount, limit) - level
  return amount > 0 and missing > asked.slack and missing * minute / limit or 0
end

local function waits_of(want, left)
  return {
    until_of(want[ASKED], left[1], want[REQUESTS]),
    until_of(want[COUNTED], left[2], want[TOKENS]),
    want[OPEN] > math.max(left[3], 0) and asked.busy or 0,
    want[HELD] > 0 and want[LEAST] > left[4] and asked.never or 0
  }
end

for _, least in ipairs(asked.spent) do
  local record = record_of(least)
  if record.period == least[PERIOD] and record.spent < least[AMOUNT] then
    use(record, least, 0, 0, 0, 0, least[AMOUNT] - record.spent)
  end
end

for _, changes in ipairs({asked.restore, asked.settle}) do
  for _, one in ipairs(changes) do
    use(record_of(one), one, one[ASKED], one[COUNTED], one[OPEN], one[HELD], one[PAID])
  end
end

-- a record that lacks what the process holds was lost, or is an old one
for _, own in ipairs(asked.held) do
  local record = record_of(own)
  local held = record.held[asked.process] or {0, 0}
  if own[7] - held[1] > asked.slack or own[8] - held[2] > asked.slack then
    record.held[asked.process] = {math.max(held[1], own[7]), math.max(held[2], own[8])}
    changed[own[NAME]] = own
    report_loss()
  end
end

local replies = {}
for at, call in ipairs(asked.calls) do
  local left, lacking, of, wait, money = {}, 0, '', 0, 0
  for number, want in ipairs(call) do
    left[number] = left_of(record_of(want), want)
    for what, needed in ipairs(waits_of(want, left[number])) do
      if needed > wait then lacking, of, wait = number, WHAT[what], needed end
    end
  end
  local silence = lost_at + asked.silence - now
  for number, want in ipairs(lacking == 0 and silence > 0 and call or {}) do
    local holds = want[OPEN] > 0 and want[PLACES] < asked.nolimit or want[HELD] > 0 and want[MONEY] < asked.nolimit
    if holds then lacking, of, wait = number, 'loss', silence end
  end
  if lacking == 0 then
    for number, want in ipairs(call) do
      if number == 1 then money = want[HELD] end
      money = math.min(money, math.max(math.floor(left[number][4]), 0))
    end
    for number, want in ipairs(call) do
      use(records[want[NAME]], want, want[ASKED], want[COUNTED], want[OPEN], money, 0)
      for what, taken in ipairs({want[ASKED], want[COUNTED], want[OPEN], money}) do
        left[number][what] = left[number][what] - taken
      end
    end
  end
  replies[at] = {lacking, of, wait, money, left}
end

for name, bound in pairs(changed) do
  local record = records[name]
  -- a record expires when it says the same as no record
  local empty = 1 - math.min(record.requests / bound[REQUESTS], record.tokens / bound[TOKENS])
  local seconds = bound[MONEY] < asked.nolimit and 40 * day or next(record.held) and day or math.max(empty, 0) * minute + 2
  redis.call('SET', prefix .. ':' .. name, cmsgpack.pack(record), 'PX', math.ceil(seconds * 1000))
end

local spent = {}
for name, record in pairs(records) do
  if record.spent > 0 then spent[#spent + 1] = {name, {record.period, record.spent}} end
end
return cjson.encode({gateways, epoch, spent, replies})
