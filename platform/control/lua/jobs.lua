-- A rollout whose host went silent holds no place that another could use; handed out again, it takes
-- one anew.
local function forget_silent_rollouts(most)
  if redis.call('SCARD', 'vla:rollouts') < most then return end
  local at = now_ms()
  for _, job_id in ipairs(redis.call('SMEMBERS', 'vla:rollouts')) do
    local state, expires, tenant = unpack(redis.call('HMGET', 'vla:j:' .. job_id, 'state',
      'lease_expires', 'tenant_id'))
    if state ~= 'reserved' or tonumber(expires) < at then
      redis.call('SREM', 'vla:rollouts', job_id)
      if tenant then redis.call('SREM', 'vla:tenant:' .. tenant .. ':rollouts', job_id) end
    end
  end
end

-- Why a running workload may not begin a training job now; nil where it may.
local function must_wait(id, w, limits)
  local jobs = redis.call('ZCARD', 'vla:w:' .. id .. ':jobs')
  local undurable = 0
  if w.target == 'steps' then
    -- Rollouts use what is published; a step that is not counts like a job in flight. Samples of
    -- a dataset use nothing.
    undurable = tonumber(w.max_policy_staleness) >= 0
      and tonumber(w.step) - tonumber(w.durable_step) or 0
    if tonumber(w.step) + jobs >= tonumber(w.total_steps) then return WAITS.ALL_RESERVED end
  elseif tonumber(w.next_position) >= tonumber(w.total_positions) then
    return WAITS.ALL_RESERVED
  end
  if jobs + undurable >= tonumber(w.max_in_flight) then return WAITS.IN_FLIGHT end
  if w.kind == 'rl' and w.harness ~= '' then
    forget_silent_rollouts(limits.rollouts)
  end
  if w.kind == 'rl' then
    -- So many versions older will its samples be when they are trained.
    local most = tonumber(w.max_policy_staleness)
    if most >= 0 and jobs + undurable > most then return WAITS.STALENESS end
    if w.harness == '' then return nil end -- the tenant's own environments
    if redis.call('SCARD', 'vla:tenant:' .. w.tenant .. ':rollouts') >= limits.tenant_rollouts then
      return WAITS.TENANT_ROLLOUTS
    end
    if redis.call('SCARD', 'vla:rollouts') >= limits.rollouts then return WAITS.ROLLOUTS end
  end
  local least = redis.call('ZRANGE', 'vla:charged', 0, 0, 'WITHSCORES')
  if least[1] == w.tenant then return nil end
  local mine = redis.call('ZSCORE', 'vla:charged', w.tenant) or 0
  if tonumber(mine) - tonumber(least[2] or 0) <= limits.share_window_s then return nil end
  -- Ahead of its share; it waits only while there is other work for the device.
  if redis.call('ZCARD', 'vla:ready:' .. w.base_model) > 0 then return WAITS.FAIR_SHARE end
  for _, worker in ipairs(redis.call('ZRANGE', 'vla:workers', 0, -1)) do
    if redis.call('ZCARD', 'vla:ready:' .. w.base_model .. ':' .. worker) > 0 then
      return WAITS.FAIR_SHARE
    end
  end
  return nil
end

local RESERVED_OF = {'state', 'waits', 'target', 'step', 'durable_step', 'total_steps',
  'total_positions', 'next_position', 'max_in_flight', 'kind', 'harness', 'max_policy_staleness',
  'tenant', 'base_model', 'policy_key', 'lifecycle', 'schema_signature', 'priority', 'base_version',
  'incarnation', 'scored_by', 'score_within_ms', 'on_unscored', 'recorded'}

local function steps_environments(job_id, w)
  if w.kind ~= 'rl' or w.harness == '' then return end
  redis.call('SADD', 'vla:rollouts', job_id)
  redis.call('SADD', 'vla:tenant:' .. w.tenant .. ':rollouts', job_id)
end

local function producer_of(w)
  if w.kind == 'sft' or w.recorded == '1' then return 'sft' end
  return w.harness == '' and 'tenant' or 'rollout'
end

-- reserve(workload, lease_ms, limits_json): a running workload's next position -> reserved.
-- A reservation whose producer went silent is handed out again under a new fence.
local function reserve(_, args)
  local id, lease_ms, at = args[1], tonumber(args[2]), now_ms()
  local key = 'vla:w:' .. id
  local w = pick(key, RESERVED_OF)
  if not w.state then return refuse('NOT_FOUND', id) end
  if w.state ~= 'running' then return cjson.encode({wait = w.state}) end
  local silent = redis.call('ZRANGEBYSCORE', key .. ':jobs', '-inf', at, 'LIMIT', 0, 1)
  if silent[1] then
    local job = 'vla:j:' .. silent[1]
    if redis.call('HINCRBY', job, 'attempt', 1) >= MOST_ATTEMPTS then
      poison(silent[1], hash(job), 'producer')
      return cjson.encode({wait = 'failed'})
    end
    -- Samples of its own place: the producer before may still be writing its.
    local fence = redis.call('HINCRBY', job, 'fence', 1)
    local partition, tenant = unpack(redis.call('HMGET', job, 'partition_id', 'tenant_id'))
    redis.call('RPUSH', 'vla:clear', partition .. ' ' .. tenant)
    redis.call('HSET', job, 'lease_expires', at + lease_ms,
      'partition_id', 'p-' .. silent[1] .. '-' .. fence)
    redis.call('ZADD', key .. ':jobs', at + lease_ms, silent[1])
    steps_environments(silent[1], w)
    return cjson.encode({job = hash(job)})
  end
  local why = must_wait(id, w, cjson.decode(args[3]))
  if why then
    if w.waits ~= why then set_workload(id, w.tenant, 'waits', why, 'waits_since', at) end
    return cjson.encode({wait = why})
  end
  if w.waits ~= '' then set_workload(id, w.tenant, 'waits', '') end
  local position = tonumber(w.next_position)
  local job_id = id .. '-' .. position .. '-' .. w.incarnation
  redis.call('HSET', key, 'next_position', position + 1)
  redis.call('ZADD', key .. ':jobs', at + lease_ms, job_id)
  local rl = w.kind == 'rl'
  steps_environments(job_id, w)
  local job = {
    job_id = job_id, workload = id, tenant_id = w.tenant, policy_key = w.policy_key,
    task_type = w.kind, base_model = w.base_model, lifecycle = w.lifecycle or w.kind,
    schema_signature = w.schema_signature, partition_id = 'p-' .. job_id, position = position,
    priority = w.priority, max_policy_staleness = rl and w.max_policy_staleness or -1,
    behavior_policy_version = tonumber(w.base_version) + tonumber(w.durable_step),
    base_version = w.base_version, state = 'reserved', attempt = 0, fence = 1,
    created_seq = redis.call('INCR', 'vla:seq:created'), created = at,
    lease_expires = at + lease_ms, producer_role = producer_of(w),
    consumer_role = 'training', scored_by = w.scored_by, score_within_ms = w.score_within_ms,
    on_unscored = w.on_unscored,
  }
  local flat = {}
  for name, value in pairs(job) do flat[#flat + 1] = name; flat[#flat + 1] = value end
  redis.call('HSET', 'vla:j:' .. job_id, unpack(flat))
  return cjson.encode({job = job})
end

-- mark(job, fence, state, fields_json): the held job goes on as its lifecycle allows:
-- reserved -> ready | needs_scores | needs_actor_forward | needs_advantages; computing_* -> what follows.
-- Returns 1 when no task is known to look at that queue, so a hint is due.
local function mark(_, args)
  local job_id, state = args[1], args[3]
  local key = 'vla:j:' .. job_id
  local j = job_of(job_id)
  if not j.state or j.fence ~= args[2] or terminal(j.lifecycle, j.state) or j.state == 'leased' then
    return refuse('LEASE_LOST', job_id)
  end
  if not allowed(j.lifecycle, j.state, state) then
    return refuse('ILLEGAL', job_id .. ': ' .. j.state .. ' -> ' .. state)
  end
  local at = now_ms()
  local flat = {'state', state, 'attempt', 0, 'lease_owner', '', 'lease_expires', 0,
    'at:' .. state, at}
  for name, value in pairs(cjson.decode(args[4])) do
    flat[#flat + 1] = name; flat[#flat + 1] = tostring(value)
  end
  if state == 'ready' then
    j.ready_seq = redis.call('INCR', 'vla:seq:ready')
    for _, value in ipairs({'ready_seq', j.ready_seq, 'ready', at}) do
      flat[#flat + 1] = value
    end
  end
  local stepped = redis.call('SISMEMBER', 'vla:rollouts', job_id) == 1
  unlist(job_id, j)
  redis.call('HSET', key, unpack(flat))
  if j.state == 'reserved' then
    redis.call('ZADD', 'vla:w:' .. j.workload .. ':jobs', '+inf', job_id)
    if stepped then -- not where the episodes were recorded, or the environments are the tenant's
      local began = tonumber(redis.call('HGET', key, 'created'))
      use(j.tenant_id, j.policy_key, j.workload, {simulator_s = (at - began) / 1000})
    end
  end
  if state ~= 'ready' then
    wake('vla:room:' .. j.workload) -- its environments are free for the next rollout
    return await_stage(job_id, j, string.sub(state, #'needs_' + 1))
  end
  j.state = state
  enqueue(job_id, j)
  if redis.call('EXISTS', 'vla:draining:' .. j.base_model) == 1 then return 0 end
  return redis.call('SET', 'vla:hint:training:' .. j.base_model, 1, 'NX', 'PX', 5000) and 1 or 0
end

-- lease_stage(stage, worker, lease_ms, base_model): needs_<stage> -> computing_<stage>, the highest
-- priority first, then the oldest. Returns the job or 'null'.
local function lease_stage(_, args)
  local stage, worker, lease_ms, at = args[1], args[2], tonumber(args[3]), now_ms()
  local queue = stage_key(stage, args[4])
  while true do
    local job_id = redis.call('ZRANGE', queue, 0, 0)[1]
    if not job_id then return 'null' end
    redis.call('ZREM', queue, job_id)
    local key = 'vla:j:' .. job_id
    local j = job_of(job_id)
    local attempt = redis.call('HINCRBY', key, 'attempt', 1)
    if attempt > MOST_ATTEMPTS and stage == 'scores' then
      give_up_scores(job_id, j, 'scoring it ended its worker ' .. MOST_ATTEMPTS .. ' times')
    elseif attempt > MOST_ATTEMPTS then
      poison(job_id, j, stage .. ' worker')
    else
      redis.call('HINCRBY', key, 'fence', 1)
      redis.call('HSET', key, 'state', 'computing_' .. stage, 'lease_owner', worker,
        'lease_expires', at + lease_ms, 'at:computing_' .. stage, at)
      redis.call('ZADD', 'vla:leases', at + lease_ms, job_id)
      return cjson.encode(hash(key))
    end
  end
end

-- renew(job, fence, lease_ms, progress_json): any held state; extends the lease and keeps the
-- progress. Refused once the job is cancelled, ended or somebody else's.
local function renew(_, args)
  local key = 'vla:j:' .. args[1]
  local j = job_of(args[1])
  if not j.state or j.fence ~= args[2] or j.lease_expires == '0'
      or terminal(j.lifecycle, j.state) then
    return refuse('LEASE_LOST', args[1])
  end
  local until_ms = now_ms() + tonumber(args[3])
  redis.call('HSET', key, 'lease_expires', until_ms, 'progress', args[4])
  if j.state == 'reserved' then
    redis.call('ZADD', 'vla:w:' .. j.workload .. ':jobs', until_ms, args[1])
  else
    redis.call('ZADD', 'vla:leases', until_ms, args[1])
  end
  return 1
end

-- drop(job, fence, reason): a held RL job -> dropped: its samples train nothing.
local function drop(_, args)
  local j = job_of(args[1])
  if not j.state or j.fence ~= args[2] or terminal(j.lifecycle, j.state) then
    return refuse('LEASE_LOST', args[1])
  end
  if not allowed(j.lifecycle, j.state, 'dropped') then
    return refuse('ILLEGAL', args[1] .. ': ' .. j.state .. ' -> dropped')
  end
  drop_job(args[1], j, args[3])
  return 1
end

-- unscored(job, fence, why): whoever held its scores cannot compute them.
local function unscored(_, args)
  local j = job_of(args[1])
  if not holds(j, args[2], 'computing_scores') then return refuse('LEASE_LOST', args[1]) end
  give_up_scores(args[1], j, args[3])
  return 1
end

-- complete(job, fence, slot_fence, step, result_json, cost_s, samples): leased -> completed; the
-- effect is recorded once and charged. Returns how many jobs of the workload are in flight, and
-- whether it is through.
local function complete(_, args)
  local job_id, fence, slot_fence, step = args[1], args[2], args[3], tonumber(args[4])
  local j = job_of(job_id)
  if not holds(j, fence, 'leased') then return refuse('LEASE_LOST', job_id) end
  if redis.call('HGET', 'vla:policy:' .. j.policy_key, 'slot_fence') ~= slot_fence then
    return refuse('LEASE_LOST', job_id)
  end
  local key = 'vla:w:' .. j.workload
  local w = pick(key, {'position', 'step', 'tenant', 'base_version', 'incarnation', 'target',
    'total_steps', 'total_positions', 'kind'})
  local at = now_ms()
  if j.position ~= w.position then return refuse('ILLEGAL', job_id .. ' is not the next position') end
  if step > tonumber(w.step) + 1 then return refuse('LEASE_LOST', job_id .. ': the ledger lost a step') end
  if w.kind == 'rl' then redis.call('HSET', key, 'dropped_in_row', 0) end
  if step > tonumber(w.step) then
    redis.call('HSET', key .. ':steps', step, args[5])
    redis.call('HSET', 'vla:policy:' .. j.policy_key, 'policy_version',
      tonumber(w.base_version) + step)
  end
  redis.call('HDEL', key .. ':attempts', j.position)
  end_job(job_id, 'completed', '', j, at)
  charge(j.tenant_id, tonumber(args[6]), tonumber(args[7]), j.policy_key, j.workload)
  local position = tonumber(j.position) + 1
  while w.kind == 'rl' and redis.call('SREM', key .. ':gone', position) == 1 do
    position = position + 1
  end
  advance(j.workload, w, position, step, at)
  return cjson.encode({in_flight = redis.call('ZCARD', key .. ':jobs'),
    through = through(w, position, step)})
end

-- How long a job stays away that goes back for the n-th time because a service is down: where only
-- its own tenant's object or quota is the trouble, the others' work goes on meanwhile.
local function backoff_ms(key)
  return math.min(MOST_BACKOFF_MS, 1000 * 2 ^ (redis.call('HINCRBY', key, 'postponed', 1) - 1))
end

-- release(job, fence, backs_off): leased -> ready, computing_<stage> -> needs_<stage>, reserved -> the
-- next producer's, unharmed: a service is down or the worker stops in order. The lease is not
-- counted. With `backs_off` it is nobody's lease for a while first.
local function release(_, args)
  local job_id, backs_off = args[1], args[3] == '1'
  local key = 'vla:j:' .. job_id
  local j = job_of(job_id)
  if j.fence ~= args[2] or terminal(j.lifecycle, j.state) then return refuse('LEASE_LOST', job_id) end
  if j.state == 'reserved' and j.lease_expires ~= '0' then
    local until_ms = backs_off and now_ms() + backoff_ms(key) or 0
    redis.call('HSET', key, 'lease_expires', 0)
    redis.call('HINCRBY', key, 'attempt', -1)
    redis.call('ZADD', 'vla:w:' .. j.workload .. ':jobs', until_ms, job_id)
    unlist(job_id, j)
    return 1
  end
  if (j.lease_owner or '') == '' then return refuse('LEASE_LOST', job_id) end
  redis.call('HSET', key, 'lease_owner', '', 'lease_expires', 0)
  redis.call('ZREM', 'vla:leases', job_id)
  if j.state == 'leased' then
    redis.call('HINCRBY', 'vla:w:' .. j.workload .. ':attempts', j.position, -1)
  else
    redis.call('HINCRBY', key, 'attempt', -1)
  end
  if backs_off then
    redis.call('HINCRBY', key, 'fence', 1)
    redis.call('ZADD', 'vla:leases', now_ms() + backoff_ms(key), job_id) -- `expire` puts it back
  elseif j.state == 'leased' then
    redis.call('HSET', key, 'state', 'ready')
    enqueue(job_id)
  else
    local stage = string.sub(j.state, #'computing_' + 1)
    redis.call('HSET', key, 'state', 'needs_' .. stage)
    redis.call('ZADD', stage_key(stage, stage_place(stage, j)), rank(j, j.created_seq), job_id)
  end
  return 1
end
