-- Work that one does alone, known by name. A claim that ran out is lost, also where nobody else took
-- it: somebody may have, and ended.
local function claim_key(work) return 'vla:producing:' .. work end

-- claim(work, by, for_ms): 1 where nobody else is at it; again by the same one, it is renewed.
local function claim(_, args)
  local key, by = claim_key(args[1]), args[2]
  local held = redis.call('GET', key)
  if held and held ~= by then return 0 end
  redis.call('SET', key, by, 'PX', args[3])
  return 1
end

-- renew_claim(work, by, for_ms): one that `by` has.
local function renew_claim(_, args)
  local key = claim_key(args[1])
  if redis.call('GET', key) ~= args[2] then return refuse('LEASE_LOST', args[1]) end
  return redis.call('PEXPIRE', key, args[3])
end

-- release_claim(work, by): 0 where it is not that of `by`, and stays.
local function release_claim(_, args)
  local key = claim_key(args[1])
  if redis.call('GET', key) ~= args[2] then return 0 end
  return redis.call('DEL', key)
end
