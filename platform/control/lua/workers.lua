-- The head of a queue and its rank, or nil.
local function head(queue, offset)
  local found = redis.call('ZRANGE', queue, offset, offset, 'WITHSCORES')
  if not found[1] then return nil end
  return found[1], tonumber(found[2])
end

local LEASED_OF = {'job_id', 'workload', 'tenant_id', 'policy_key', 'task_type', 'lifecycle',
  'base_model', 'schema_signature', 'partition_id', 'position', 'priority', 'state', 'fence',
  'behavior_policy_version', 'max_policy_staleness', 'sample_count', 'domain', 'created_seq',
  'ready_seq', 'ready', 'base_version', 'producer_role', 'consumer_role'}

-- lease_group(worker, base_model, max_jobs, lease_ms): ready -> leased, for the next jobs of several
-- policies whose slot is free or the worker's; highest priority first and FIFO within it. RL samples
-- that are too old are dropped on the way. A job whose worker died before is leased alone, so that
-- nobody is blamed twice.
local function lease_group(_, args)
  local worker, base, max_jobs, lease_ms = args[1], args[2], tonumber(args[3]), tonumber(args[4])
  local at, group = now_ms(), {}
  bury_silent(at)
  redis.call('ZADD', 'vla:workers', at + lease_ms, worker)
  redis.call('SET', 'vla:draining:' .. base, worker, 'PX', 3000)
  local free, own = 'vla:ready:' .. base, 'vla:ready:' .. base .. ':' .. worker
  local skipped = {[free] = 0, [own] = 0} -- what has to be leased alone, and is not the first
  while #group < max_jobs do
    local job_id, at_rank = head(own, skipped[own])
    local other, other_rank = head(free, skipped[free])
    local queue = own
    if other and (not job_id or other_rank < at_rank) then job_id, queue = other, free end
    if not job_id then break end
    local key = 'vla:j:' .. job_id
    local j = pick(key, LEASED_OF)
    local policy = 'vla:policy:' .. j.policy_key
    local attempts_key = 'vla:w:' .. j.workload .. ':attempts'
    local version, slot_fence = unpack(redis.call('HMGET', policy, 'policy_version', 'slot_fence'))
    local attempts = redis.call('HINCRBY', attempts_key, j.position, 1) - 1
    local age = tonumber(version or 0) - tonumber(j.behavior_policy_version or 0)
    if tonumber(j.max_policy_staleness) >= 0 and age > tonumber(j.max_policy_staleness) then
      drop_job(job_id, j, 'policy_stale')
    elseif attempts >= MOST_ATTEMPTS then
      poison(job_id, j, 'worker')
    elseif attempts > 0 and #group > 0 then
      redis.call('HINCRBY', attempts_key, j.position, -1)
      skipped[queue] = skipped[queue] + 1
    else
      local mount = 0
      if queue == free then
        mount = 1
        slot_fence = tonumber(slot_fence or 0) + 1
        redis.call('HSET', policy, 'slot_owner', worker, 'slot_fence', slot_fence)
        redis.call('SADD', 'vla:slots:' .. worker, j.policy_key)
      end
      redis.call('ZREM', queue, job_id)
      redis.call('HSET', key, 'state', 'leased', 'fence', tonumber(j.fence) + 1, 'lease_owner',
        worker, 'leased', at, 'lease_expires', at + lease_ms, 'attempt', attempts + 1)
      redis.call('ZADD', 'vla:leases', at + lease_ms, job_id)
      j.fence, j.state, j.lease_owner = tonumber(j.fence) + 1, 'leased', worker
      j.attempt, j.lease_expires, j.mount = attempts + 1, at + lease_ms, mount
      j.queue_wait_ms = at - tonumber(j.ready)
      j.slot_fence = slot_fence
      group[#group + 1] = j
      if attempts > 0 then break end
    end
  end
  return list(group)
end

-- heartbeat(worker, lease_ms, job...): the worker lives, and keeps the leases of the jobs that it says
-- it works on. Returns those that are its own no longer: cancellation and lost leases come back so.
local function heartbeat(_, args)
  local worker, until_ms, gone = args[1], now_ms() + tonumber(args[2]), {}
  redis.call('ZADD', 'vla:workers', until_ms, worker)
  for i = 3, #args do
    local key = 'vla:j:' .. args[i]
    local state, owner = unpack(redis.call('HMGET', key, 'state', 'lease_owner'))
    if state == 'leased' and owner == worker then
      redis.call('ZADD', 'vla:leases', until_ms, args[i])
      redis.call('HSET', key, 'lease_expires', until_ms)
    else
      gone[#gone + 1] = args[i]
    end
  end
  return list(gone)
end

-- leave(worker, policy_key or ''): gives slots back at once; all of a worker that stops in order,
-- or that of one policy whose state the worker does not trust any more.
local function leave(_, args)
  local worker, policy_key = args[1], args[2]
  local slots = 'vla:slots:' .. worker
  if policy_key ~= '' then
    local owns = redis.call('SISMEMBER', slots, policy_key)
    if owns == 1 then free_slot(policy_key) end
    return owns
  end
  local count = redis.call('SCARD', slots)
  bury(worker)
  return count
end

local function go_back(id, w, position, step)
  local key = 'vla:w:' .. id
  end_jobs(id, 'cancelled', 'rewound')
  for _, done in ipairs(redis.call('HKEYS', key .. ':steps')) do
    if tonumber(done) > step then redis.call('HDEL', key .. ':steps', done) end
  end
  redis.call('DEL', key .. ':gone')
  set_workload(id, w.tenant, 'position', position, 'next_position', position, 'step', step,
    'incarnation', tonumber(w.incarnation) + 1)
end

-- rewind(workload, slot_fence, position, step, force): the slot was restored at `position`. What came
-- after died with its worker: outstanding jobs end, later steps leave the log, positions are redone.
-- With force also where the position agrees: the samples of its jobs are lost.
local function rewind(_, args)
  local id, position, step = args[1], tonumber(args[3]), tonumber(args[4])
  local w = hash('vla:w:' .. id)
  if w.state ~= 'running' and w.state ~= 'paused' then return refuse('LEASE_LOST', id) end
  local fence = redis.call('HGET', 'vla:policy:' .. w.policy_key, 'slot_fence')
  if fence ~= args[2] then return refuse('LEASE_LOST', id) end
  -- Positions of RL also pass by jobs that were dropped: only a lost step is a reason to go back.
  local agrees = tonumber(w.position) == position
  if w.target == 'steps' then agrees = tonumber(w.step) == step end
  if agrees and args[5] ~= '1' then return 0 end
  -- The lease that found this out did no work on the position: it is no attempt.
  if tonumber(redis.call('HGET', 'vla:w:' .. id .. ':attempts', w.position) or 0) > 0 then
    redis.call('HINCRBY', 'vla:w:' .. id .. ':attempts', w.position, -1)
  end
  go_back(id, w, position, step)
  return 1
end

-- What a worker did and did not save before it died, with no ready job that would let another restore
-- the slot: steps that nobody will make durable.
local function is_stranded(w)
  if redis.call('HEXISTS', 'vla:policy:' .. w.policy_key, 'slot_owner') == 1 then return false end
  if w.target == 'steps' then return tonumber(w.step) > tonumber(w.durable_step) end
  return through(w, tonumber(w.position), tonumber(w.step))
    and not through(w, tonumber(w.durable_position), tonumber(w.durable_step))
end

-- fall_back(workload): a stranded workload goes back to what is durable. Returns 1 where it did.
local function fall_back(_, args)
  local w = hash('vla:w:' .. args[1])
  if (w.state ~= 'running' and w.state ~= 'paused') or not is_stranded(w) then return 0 end
  -- Who had the slot may come to life with an upload of what is redone from here on.
  redis.call('HINCRBY', 'vla:policy:' .. w.policy_key, 'slot_fence', 1)
  go_back(args[1], w, tonumber(w.durable_position), tonumber(w.durable_step))
  return 1
end

-- expire(): leases that nobody renewed return to where they can be leased again.
local function expire(_, _)
  local at, count = now_ms(), 0
  bury_silent(at)
  for _, job_id in ipairs(redis.call('ZRANGEBYSCORE', 'vla:leases', '-inf', at, 'LIMIT', 0, 512)) do
    local key = 'vla:j:' .. job_id
    local j = job_of(job_id)
    redis.call('ZREM', 'vla:leases', job_id)
    redis.call('HINCRBY', key, 'fence', 1)
    redis.call('HSET', key, 'lease_owner', '', 'lease_expires', 0)
    if j.state == 'leased' then
      redis.call('HSET', key, 'state', 'ready')
      enqueue(job_id)
    else
      local stage = string.sub(j.state, #'computing_' + 1)
      redis.call('HSET', key, 'state', 'needs_' .. stage)
      redis.call('ZADD', stage_key(stage, stage_place(stage, j)), rank(j, j.created_seq), job_id)
    end
    count = count + 1
  end
  for _, job_id in ipairs(redis.call('ZRANGEBYSCORE', 'vla:deadlines', '-inf', at, 'LIMIT', 0, 512)) do
    redis.call('ZREM', 'vla:deadlines', job_id)
    local j = job_of(job_id)
    if j.state == 'needs_scores' or j.state == 'computing_scores' then
      give_up_scores(job_id, j, 'its deadline passed')
    end
  end
  return count
end

-- pending(): workloads that wait: {prepare = [...], admit = [...]}, higher priority first, then first
-- come first.
local function pending(_, _)
  local waiting, due = {}, {prepare = {}, admit = {}}
  for _, id in ipairs(redis.call('SMEMBERS', 'vla:pending')) do
    local w = redis.call('HMGET', 'vla:w:' .. id, 'prepared', 'priority', 'created')
    waiting[#waiting + 1] = {id = id, prepared = w[1], priority = tonumber(w[2]), created = tonumber(w[3])}
  end
  table.sort(waiting, function(a, b)
    if a.priority ~= b.priority then return a.priority > b.priority end
    if a.created ~= b.created then return a.created < b.created end
    return a.id < b.id
  end)
  for _, w in ipairs(waiting) do
    local line = w.prepared == '1' and due.admit or due.prepare
    line[#line + 1] = w.id
  end
  return cjson.encode({prepare = #due.prepare > 0 and due.prepare or nil,
    admit = #due.admit > 0 and due.admit or nil})
end

-- review(cursor): a part of the running workloads: ends those over their time, and names those with
-- room and no producer, and those that are stranded. Returns {cursor, produce, stranded}.
local function review(_, args)
  local at, produce, stranded = now_ms(), {}, {}
  local scan = redis.call('SSCAN', 'vla:running', args[1], 'COUNT', 256)
  for _, id in ipairs(scan[2]) do
    local key = 'vla:w:' .. id
    local w = hash(key)
    local limit_ms = tonumber(w.max_seconds or 0) * 1000
    if w.state ~= 'running' then
      redis.call('SREM', 'vla:running', id)
    elseif limit_ms > 0 and at - tonumber(w.started) > limit_ms then
      end_workload(id, w, 'failed', cjson.encode({code = 'time_limit', message =
        'limits.max_seconds: the run took longer than ' .. w.max_seconds .. ' s'}))
    else
      if is_stranded(w) then stranded[#stranded + 1] = id end
      local jobs = redis.call('ZCARD', key .. ':jobs')
      local left
      if w.target == 'steps' then
        left = tonumber(w.step) + jobs < tonumber(w.total_steps)
      else
        left = tonumber(w.next_position) < tonumber(w.total_positions)
      end
      local silent = redis.call('ZCOUNT', key .. ':jobs', '-inf', at) > 0
      if (silent or (left and jobs < tonumber(w.max_in_flight)))
          and redis.call('EXISTS', 'vla:producing:' .. id) == 0 then
        produce[#produce + 1] = id
      end
    end
  end
  return cjson.encode({cursor = scan[1], produce = #produce > 0 and produce or nil,
    stranded = #stranded > 0 and stranded or nil})
end
