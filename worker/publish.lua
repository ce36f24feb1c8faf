-- One write of the worker that holds the claim. Nothing is written unless the claim is still its own.
-- KEYS: meta, worker, then the keys of the operation
-- ARGV: 1 operation   2 epoch   3 acknowledged: number of the last write that this worker knows to be done
--       4.. what the operation below takes
-- Reply: status, server time in ms, and
--        OK and the operation's count | NOCLAIM | LOST (an acknowledged write is gone) | SUPERSEDED epoch writer
local META, WORKER = KEYS[1], KEYS[2]
local epoch, acknowledged = tonumber(ARGV[2]), tonumber(ARGV[3])

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- The epoch of a key that may be written (0: there is none), or nil where (epoch, version) there is newer
-- or the key is something else than a hash.
local function writable(key, version)
  local there = redis.pcall('HMGET', key, 'epoch', 'version')
  if there.err then return nil end
  local epoch_there = tonumber(there[1]) or 0
  if epoch_there > epoch then return nil end
  if epoch_there == epoch and (tonumber(there[2]) or 0) > version then return nil end
  return epoch_there
end

local operations = {}

-- 4 version   5 updated_ms   6 ttl_s   7 positions   8 number of fields   9.. their names, then a value of
-- each field for the first key, for the second key, ... Counts the keys that were newer.
function operations.write()
  local version, ttl, width = tonumber(ARGV[4]), tonumber(ARGV[6]), tonumber(ARGV[8])
  local hash = {'', 'epoch', ARGV[2], 'version', ARGV[4], 'updated_ms', ARGV[5]}
  for field = 1, width do hash[6 + 2 * field] = ARGV[8 + field] end
  local refused, value = 0, 8 + width
  for i = 3, #KEYS do
    local key = KEYS[i]
    local epoch_there = writable(key, version)
    if epoch_there then
      hash[1] = key
      for field = 1, width do hash[7 + 2 * field] = ARGV[value + field] end
      redis.call('HSET', unpack(hash))
      if ttl > 0 then
        redis.call('EXPIRE', key, ttl)
      elseif epoch_there > 0 and epoch_there < epoch then
        redis.call('PERSIST', key) -- the worker before us may have run with a time to live
      end
    else
      refused = refused + 1
    end
    value = value + width
  end
  if ARGV[7] ~= '' then redis.call('HSET', WORKER, 'positions', ARGV[7]) end
  return refused
end

-- 4 version. Counts the keys that were newer.
function operations.remove()
  local version, refused = tonumber(ARGV[4]), 0
  for i = 3, #KEYS do
    if writable(KEYS[i], version) then redis.call('UNLINK', KEYS[i]) else refused = refused + 1 end
  end
  return refused
end

-- 4.. score and member, by turns.
function operations.popular()
  redis.call('UNLINK', KEYS[3])
  for first = 4, #ARGV, 2000 do
    redis.call('ZADD', KEYS[3], unpack(ARGV, first, math.min(first + 1999, #ARGV)))
  end
  return 0
end

-- 4 now_ms   5 length of the stream   6.. fields and values by turns; an empty value takes the field away.
function operations.heartbeat()
  for i = 6, #ARGV, 2 do
    if ARGV[i + 1] == '' then
      redis.call('HDEL', WORKER, ARGV[i])
    else
      redis.call('HSET', WORKER, ARGV[i], ARGV[i + 1])
    end
  end
  redis.call('HSET', WORKER, 'heartbeat_ms', ARGV[4])
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', unpack(redis.call('HGETALL', WORKER)))
  return 0
end

-- 4 version. Deletes what was written last by an older epoch, or before this version, and counts it.
function operations.sweep()
  local oldest, deleted = tonumber(ARGV[4]), 0
  for i = 3, #KEYS do
    local there = redis.pcall('HMGET', KEYS[i], 'epoch', 'version')
    local epoch_there = not there.err and tonumber(there[1])
    local old = epoch_there == epoch and (tonumber(there[2]) or 0) < oldest
    if epoch_there and (epoch_there < epoch or old) then
      redis.call('UNLINK', KEYS[i])
      deleted = deleted + 1
    end
  end
  return deleted
end

local claimed = tonumber(redis.call('HGET', META, 'epoch')) or 0
if claimed > epoch then
  return {'SUPERSEDED', now, claimed, redis.call('HGET', WORKER, 'writer') or ''}
end
if claimed < epoch then return {'NOCLAIM', now} end

local there = redis.call('HMGET', WORKER, 'epoch', 'writes')
local writes = tonumber(there[2]) or -1
if tonumber(there[1]) ~= epoch or writes < acknowledged then return {'LOST', now} end

-- A call from the past: it was repeated, answered and followed by others while this one was still under way.
if writes > acknowledged + 1 then return {'OK', now, 0} end

if ARGV[1] == 'watch' then return {'OK', now, 0} end
if ARGV[1] == 'sweep' then return {'OK', now, operations.sweep()} end
-- A heartbeat whose reply was lost is there already; everything else may be written twice.
if ARGV[1] == 'heartbeat' and writes > acknowledged then return {'OK', now, 0} end
local count = operations[ARGV[1]]()
redis.call('HSET', WORKER, 'writes', string.format('%.0f', acknowledged + 1))
return {'OK', now, count}
