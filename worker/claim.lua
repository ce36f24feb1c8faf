-- Who may write here: the worker with the newest epoch.
-- KEYS: meta, worker, claim
-- ARGV: 1 'start' or 'return'   2 epoch (start: the new one must be above it)   3 writer (host:pid)   4 now_ms
--       5 positions   6 acknowledged   7 witness_ms   8 limit_ms   9 patience_ms   10 '1' = other layouts give way
--       11 instance: this run of a worker, and no other   12.. the fields of meta with their values, the five that
--       must not change first
-- Reply: status, server time in ms, and
--        OK epoch positions | CONFLICT the five values there | SUPERSEDED epoch writer | WAIT
local META, WORKER, CLAIM = KEYS[1], KEYS[2], KEYS[3]
local IDENTITY = 5

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local claimed = tonumber(redis.call('HGET', META, 'epoch')) or 0
local waiting = redis.call('HMGET', CLAIM, 'epoch', 'since_ms', 'last_ms', 'writer')
local bid = tonumber(waiting[1]) or 0

local function take(epoch, acknowledged, positions)
  local text = string.format('%.0f', epoch)
  redis.call('HSET', META, 'epoch', text, unpack(ARGV, 12))
  redis.call('DEL', WORKER, CLAIM)
  redis.call('HSET', WORKER, 'epoch', text, 'writer', ARGV[3], 'instance', ARGV[11], 'writes', acknowledged,
    'heartbeat_ms', ARGV[4])
  if positions ~= '' then redis.call('HSET', WORKER, 'positions', positions) end
  return {'OK', now, epoch, positions}
end

-- A call that is repeated, because its reply was lost or late, changes nothing: the claim is there already.
local there_now = redis.call('HMGET', WORKER, 'epoch', 'instance', 'writes', 'positions')
local repeated = claimed > 0 and tonumber(there_now[1]) == claimed and there_now[2] == ARGV[11]

local function start()
  if repeated then return {'OK', now, claimed, there_now[4] or ''} end
  local there = {}
  local differs = false
  for i = 1, IDENTITY do
    local name, ours = ARGV[10 + 2 * i], ARGV[11 + 2 * i]
    there[i] = redis.call('HGET', META, name) or ''
    differs = differs or (there[i] ~= '' and there[i] ~= ours)
  end
  if differs and ARGV[10] ~= '1' then return {'CONFLICT', now, unpack(there)} end
  return take(math.max(claimed, bid, tonumber(ARGV[2])) + 1, 0, there_now[4] or '')
end

-- The claim is gone (a flush, an empty server) or older than ours (a failover lost it). A worker that the
-- server has acknowledged within limit_ms was not away and takes it back at once. Any other may have been
-- frozen while a newer one took over: it bids without a pause for patience_ms, and a newer bid ends that.
local function come_back()
  local epoch, limit = tonumber(ARGV[2]), tonumber(ARGV[8])
  if claimed > epoch then
    return {'SUPERSEDED', now, claimed, redis.call('HGET', WORKER, 'writer') or ''}
  end
  if bid > epoch then return {'SUPERSEDED', now, bid, waiting[4] or ''} end
  if repeated and (tonumber(there_now[3]) or -1) >= tonumber(ARGV[6]) then return {'OK', now, epoch, ARGV[5]} end
  if claimed == epoch or math.abs(now - tonumber(ARGV[7])) <= limit then
    return take(epoch, ARGV[6], ARGV[5])
  end
  local since = tonumber(waiting[2]) or now
  if bid ~= epoch or now - tonumber(waiting[3]) > limit then since = now end
  if now - since >= tonumber(ARGV[9]) then return take(epoch, ARGV[6], ARGV[5]) end
  redis.call('HSET', CLAIM, 'epoch', ARGV[2], 'writer', ARGV[3],
    'since_ms', string.format('%.0f', since), 'last_ms', string.format('%.0f', now))
  redis.call('PEXPIRE', CLAIM, 2 * tonumber(ARGV[9]))
  return {'WAIT', now}
end

if ARGV[1] == 'start' then return start() end
return come_back()
