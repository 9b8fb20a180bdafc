#!lua name=vla_payloads
-- The payload index's operations, atomic and on server time. They run with the caller's rights:
-- a tenant reaches <tenant>:payload:* and nothing else.
--
--   <tenant>:payload:<partition>            hash  s:<n> header n; d:<segment> place of a draft;
--                                                 b:<segment> bytes charged; c:<consumer> marks
--   <tenant>:payload:<partition>:~<consumer> set  rows consumed
--   <tenant>:payload:<partition>:<segment>:<n>    bodies (redis.py)
--   <tenant>:payload:~partitions            hash  partition -> "bytes expires created owner", ms
--   <tenant>:quota:payload                  string  the tenant's own limit, bytes; read only

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- Everything follows from the partition's key: a caller cannot name another registry or limit.
local function names(meta)
  local tenant, partition = string.match(meta, '^([a-z0-9-]+):payload:([A-Za-z0-9_.-]+)$')
  return tenant .. ':payload:~partitions', partition, tenant .. ':quota:payload'
end

local function parse(line)
  local bytes, expires, created, owner = string.match(line, '^(%S+) (%S+) (%S+) (%S+)$')
  return tonumber(bytes), tonumber(expires), tonumber(created), owner
end

local function entry(bytes, expires, created, owner)
  return string.format('%.0f %.0f %.0f %s', bytes, expires, created, owner)
end

local function headers_of(meta)
  local found, n = {}, 0
  while true do
    local header = redis.call('HGET', meta, 's:' .. n)
    if not header then return found end
    n = n + 1
    found[n] = header
  end
end

local function charge(registry, partition, bytes)
  local line = redis.call('HGET', registry, partition)
  if line then
    local used, expires, created, owner = parse(line)
    redis.call('HSET', registry, partition, entry(math.max(0, used + bytes), expires, created, owner))
  end
end

-- KEYS: partition. ARGV: segment, place, bytes, ttl_ms, limit where the tenant has none, owner.
local function begin(keys, args)
  local meta, at = keys[1], now_ms()
  local registry, partition, quota = names(meta)
  local bytes, ttl = tonumber(args[3]), tonumber(args[4])
  local limit = tonumber(redis.call('GET', quota) or args[5])
  if redis.call('HEXISTS', meta, 'b:' .. args[1]) == 1 then return headers_of(meta) end
  local used, own, until_ms = 0, nil, at + ttl
  local lines = redis.call('HGETALL', registry)
  for i = 1, #lines, 2 do
    local held, expires = parse(lines[i + 1])
    if not held or expires <= at then
      redis.call('HDEL', registry, lines[i])
    else
      used = used + held
      if lines[i] == partition then own = lines[i + 1] end
      if expires > until_ms then until_ms = expires end
    end
  end
  if used + bytes > limit then
    return redis.error_reply(string.format('VLA_FULL %.0f of %.0f bytes are used', used, limit))
  end
  local held, expires, created, owner = 0, 0, at, args[6]
  if own then held, expires, created, owner = parse(own) end
  expires = math.max(expires, at + ttl)
  redis.call('HSET', registry, partition, entry(held + bytes, expires, created, owner))
  redis.call('PEXPIREAT', registry, until_ms)
  redis.call('HSET', meta, 'd:' .. args[1], args[2], 'b:' .. args[1], args[3])
  redis.call('PEXPIREAT', meta, expires)
  for _, field in ipairs(redis.call('HKEYS', meta)) do
    if string.sub(field, 1, 2) == 'c:' then
      redis.call('PEXPIREAT', meta .. ':~' .. string.sub(field, 3), expires)
    end
  end
  return headers_of(meta)
end

-- KEYS: partition. ARGV: segment, header, seq. 1: done, 0: others were first, -1: cleared.
local function append(keys, args)
  local meta, field = keys[1], 's:' .. args[3]
  if redis.call('HEXISTS', meta, 'd:' .. args[1]) == 0 then
    return redis.call('HGET', meta, field) == args[2] and 1 or -1
  end
  local before = tonumber(args[3])
  if redis.call('HEXISTS', meta, field) == 1 then return 0 end
  if before > 0 and redis.call('HEXISTS', meta, 's:' .. (before - 1)) == 0 then return -1 end
  redis.call('HSET', meta, field, args[2])
  redis.call('HDEL', meta, 'd:' .. args[1])
  return 1
end

-- KEYS: partition. ARGV: segment. Ends a draft that was not appended.
local function abandon(keys, args)
  local meta = keys[1]
  local registry, partition = names(meta)
  if redis.call('HDEL', meta, 'd:' .. args[1]) == 0 then return 0 end
  local bytes = tonumber(redis.call('HGET', meta, 'b:' .. args[1]) or 0)
  redis.call('HDEL', meta, 'b:' .. args[1])
  if redis.call('EXISTS', meta) == 0 then
    redis.call('HDEL', registry, partition)
  else
    charge(registry, partition, -bytes)
  end
  return 1
end

-- KEYS: partition. Returns all fields, which are gone then.
local function clear(keys, _)
  local meta = keys[1]
  local registry, partition = names(meta)
  local all = redis.call('HGETALL', meta)
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 2) == 'c:' then
      redis.call('UNLINK', meta .. ':~' .. string.sub(all[i], 3))
    end
  end
  redis.call('UNLINK', meta)
  redis.call('HDEL', registry, partition)
  return all
end

-- KEYS: partition. ARGV: consumer, rows. Returns the rows that were not marked before.
local function mark(keys, args)
  local meta, set = keys[1], keys[1] .. ':~' .. args[1]
  local left = redis.call('PTTL', meta)
  if left < 0 then return redis.error_reply('VLA_NOT_FOUND no such partition') end
  local fresh = {}
  for i = 2, #args do
    if redis.call('SADD', set, args[i]) == 1 then fresh[#fresh + 1] = args[i] end
  end
  redis.call('HSET', meta, 'c:' .. args[1], '1')
  redis.call('PEXPIRE', set, left)
  return fresh
end

redis.register_function('vla_payload_begin', begin)
redis.register_function('vla_payload_append', append)
redis.register_function{function_name = 'vla_payload_abandon', callback = abandon, flags = {'allow-oom'}}
redis.register_function{function_name = 'vla_payload_clear', callback = clear, flags = {'allow-oom'}}
redis.register_function('vla_payload_mark', mark)
