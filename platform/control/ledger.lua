#!lua name=vla
-- The ledger's operations. Each is one atomic function on server time; Python declares the state
-- tables (control/states.py) and puts them in place of the marker below, so there is one truth.
--
--   vla:w:<workload>             hash   workload (state, policy, position, step, ...)
--   vla:w:<workload>:history     list   {"state","at","reason"} per transition
--   vla:w:<workload>:jobs        set    its training jobs that are not terminal
--   vla:w:<workload>:steps       hash   optimizer step -> result of the job that made it
--   vla:w:<workload>:attempts    hash   position -> failed leases of that position
--   vla:t:<tenant>:workloads     zset   workload -> created (ms); the tenant may read vla:t:<tenant>:*
--   vla:t:<tenant>:w:<workload>  hash   the tenant's view of its workload
--   vla:j:<job>                  hash   training-job descriptor
--   vla:pending, vla:running     set    workloads in that state
--   vla:policy:<policy_key>      hash   running workload, policy_version, slot owner, fence, expiry
--   vla:t:<tenant>:policies      hash   policy -> base model
--   vla:published                stream policy, version: notices of new current versions
--   vla:ready:<base model>       zset   job -> rank (priority first, then ready_seq)
--   vla:leases                   zset   job -> lease_expires (ms)
--   vla:clear                    list   partitions whose payload is due for clearing

local TABLES = @TABLES@
local RETENTION_S = 7 * 24 * 3600
local PRIORITY_STEP = 1e12

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function hash(key)
  local flat, out = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do out[flat[i]] = flat[i + 1] end
  return out
end

local function refuse(code, text) return redis.error_reply('VLA_' .. code .. ' ' .. text) end

local function allowed(kind, from, to)
  for _, state in ipairs(TABLES[kind][from] or {}) do if state == to then return true end end
  return false
end

local function terminal(kind, state) return #(TABLES[kind][state] or {}) == 0 end

-- The tenant reads a copy under its own prefix: its ACL never reaches the platform's keys.
local function mirror(id, w)
  redis.call('HSET', 'vla:t:' .. w.tenant .. ':w:' .. id, unpack((function()
    local flat = {}
    for k, v in pairs(hash('vla:w:' .. id)) do flat[#flat + 1] = k; flat[#flat + 1] = v end
    return flat
  end)()))
end

local function record(id, w, state, reason)
  local at = now_ms()
  redis.call('HSET', 'vla:w:' .. id, 'state', state, 'updated', at)
  if reason ~= '' then redis.call('HSET', 'vla:w:' .. id, 'reason', reason) end
  local line = cjson.encode({state = state, at = at, reason = reason})
  redis.call('RPUSH', 'vla:w:' .. id .. ':history', line)
  redis.call('RPUSH', 'vla:t:' .. w.tenant .. ':w:' .. id .. ':history', line)
  redis.call('SREM', 'vla:pending', id)
  redis.call('SREM', 'vla:running', id)
  if state == 'pending' or state == 'running' then redis.call('SADD', 'vla:' .. state, id) end
  redis.call('XADD', 'vla:t:' .. w.tenant .. ':w:' .. id .. ':events', 'MAXLEN', '~', 100000, '*',
    'event', cjson.encode({kind = 'state', state = state, at = at, reason = reason}))
  mirror(id, w)
end

local function end_job(job_id, state, reason)
  local key = 'vla:j:' .. job_id
  local j = hash(key)
  redis.call('HSET', key, 'state', state, 'terminal_reason', reason, 'ended', now_ms())
  redis.call('EXPIRE', key, RETENTION_S)
  redis.call('ZREM', 'vla:ready:' .. j.base_model, job_id)
  redis.call('ZREM', 'vla:leases', job_id)
  redis.call('SREM', 'vla:w:' .. j.workload .. ':jobs', job_id)
  redis.call('RPUSH', 'vla:clear', j.partition_id .. ' ' .. j.tenant_id)
end

local function end_jobs(id, state, reason)
  for _, job_id in ipairs(redis.call('SMEMBERS', 'vla:w:' .. id .. ':jobs')) do
    end_job(job_id, state, reason)
  end
end

local function end_workload(id, w, state, reason)
  local job_state = state == 'cancelled' and 'cancelled' or 'failed'
  end_jobs(id, job_state, reason)
  record(id, w, state, reason)
  local policy = 'vla:policy:' .. w.policy_key
  if redis.call('HGET', policy, 'workload') == id then
    redis.call('HDEL', policy, 'workload', 'slot_owner', 'slot_expires')
  end
end

-- submit(workload, fields_json): pending. The same id with the same spec digest is the same submit.
local function submit(_, args)
  local id, fields = args[1], cjson.decode(args[2])
  local key = 'vla:w:' .. id
  local known = redis.call('HGET', key, 'spec_digest')
  if known then
    if known ~= fields.spec_digest then return refuse('CONFLICT', id) end
    return 0
  end
  local waiting = 0
  for _, other in ipairs(redis.call('SMEMBERS', 'vla:pending')) do
    if redis.call('HGET', 'vla:w:' .. other, 'tenant') == fields.tenant then waiting = waiting + 1 end
  end
  if waiting >= tonumber(args[3]) then return refuse('QUOTA', waiting .. ' runs are waiting') end
  local at = now_ms()
  for k, v in pairs(fields) do redis.call('HSET', key, k, tostring(v)) end
  redis.call('HSET', key, 'id', id, 'created', at, 'position', 0, 'step', 0, 'next_position', 0,
    'incarnation', 0, 'durable_position', 0, 'durable_step', 0, 'prepared', 0)
  redis.call('ZADD', 'vla:t:' .. fields.tenant .. ':workloads', at, id)
  if fields.policy_key and fields.base_model then
    redis.call('HSET', 'vla:t:' .. fields.tenant .. ':policies',
      string.match(fields.policy_key, '/(.*)$'), fields.base_model)
  end
  record(id, fields, 'pending', '')
  return 1
end

-- prepared(workload, total_positions, total_steps): the data was opened and measured.
local function prepared(_, args)
  local key = 'vla:w:' .. args[1]
  local w = hash(key)
  if not w.state then return refuse('NOT_FOUND', args[1]) end
  if w.state ~= 'pending' then return 0 end
  redis.call('HSET', key, 'prepared', 1, 'total_positions', args[2], 'total_steps', args[3])
  mirror(args[1], w)
  return 1
end

-- admit(workload, max_running): pending -> running when its policy is free and the tenant has room.
-- Returns 'running' or why it waits.
local function admit(_, args)
  local id = args[1]
  local w = hash('vla:w:' .. id)
  if not w.state then return refuse('NOT_FOUND', id) end
  if w.state ~= 'pending' then return w.state end
  if w.prepared ~= '1' then return 'waits: data is being prepared' end
  local policy = 'vla:policy:' .. w.policy_key
  local other = redis.call('HGET', policy, 'workload')
  if other and other ~= id then return 'waits: ' .. other .. ' trains this policy' end
  local running = 0
  for _, r in ipairs(redis.call('SMEMBERS', 'vla:running')) do
    if redis.call('HGET', 'vla:w:' .. r, 'tenant') == w.tenant then running = running + 1 end
  end
  if running >= tonumber(args[2]) then return 'waits: ' .. running .. ' runs of this tenant' end
  redis.call('HSET', policy, 'workload', id)
  local base = redis.call('HGET', policy, 'policy_version') or 0
  redis.call('HSET', 'vla:w:' .. id, 'base_version', base, 'started', now_ms())
  record(id, w, 'running', '')
  return 'running'
end

-- reserve(workload, lease_ms): the next position of a running workload, within max_in_flight.
-- A reservation whose producer went silent is handed out again under a new fence.
local function reserve(_, args)
  local id, lease_ms, at = args[1], tonumber(args[2]), now_ms()
  local key = 'vla:w:' .. id
  local w = hash(key)
  if not w.state then return refuse('NOT_FOUND', id) end
  if w.state ~= 'running' then return cjson.encode({wait = w.state}) end
  local jobs = redis.call('SMEMBERS', key .. ':jobs')
  for _, job_id in ipairs(jobs) do
    local j = hash('vla:j:' .. job_id)
    if j.state == 'reserved' and tonumber(j.lease_expires) < at then
      local attempt = redis.call('HINCRBY', 'vla:j:' .. job_id, 'attempt', 1)
      if attempt > 3 then
        local why = cjson.encode({code = 'poison', message = 'position ' .. j.position ..
          ' ended its producer 3 times'})
        end_job(job_id, 'failed', why); end_workload(id, w, 'failed', why)
        return cjson.encode({wait = 'failed'})
      end
      redis.call('HSET', 'vla:j:' .. job_id, 'lease_expires', at + lease_ms)
      redis.call('HINCRBY', 'vla:j:' .. job_id, 'fence', 1)
      return cjson.encode({job = hash('vla:j:' .. job_id)})
    end
  end
  if #jobs >= tonumber(w.max_in_flight) then return cjson.encode({wait = 'in-flight limit'}) end
  local position = tonumber(w.next_position)
  if position >= tonumber(w.total_positions) then return cjson.encode({wait = 'all reserved'}) end
  local job_id = id .. '-' .. position .. '-' .. w.incarnation
  redis.call('HSET', key, 'next_position', position + 1)
  redis.call('SADD', key .. ':jobs', job_id)
  redis.call('HSET', 'vla:j:' .. job_id, 'job_id', job_id, 'workload', id, 'tenant_id', w.tenant,
    'policy_key', w.policy_key, 'task_type', w.kind, 'base_model', w.base_model,
    'schema_signature', w.schema_signature, 'partition_id', 'p-' .. job_id, 'position', position,
    'priority', w.priority, 'state', 'reserved', 'attempt', 0, 'fence', 1,
    'created_seq', redis.call('INCR', 'vla:seq:created'), 'created', at,
    'lease_expires', at + lease_ms, 'producer_role', 'sft', 'consumer_role', 'training')
  return cjson.encode({job = hash('vla:j:' .. job_id)})
end

local function held(j, fence, state)
  return j.state == state and j.fence == fence
end

-- mark_ready(job, fence, sample_count, domain): reserved -> ready, in the order of `ready_seq`.
-- Returns 1 when no training task is known to be draining this base model, so a hint is due.
local function mark_ready(_, args)
  local key = 'vla:j:' .. args[1]
  local j = hash(key)
  if not held(j, args[2], 'reserved') then return refuse('LEASE_LOST', args[1]) end
  local seq = redis.call('INCR', 'vla:seq:ready')
  redis.call('HSET', key, 'state', 'ready', 'ready_seq', seq, 'sample_count', args[3],
    'domain', args[4], 'ready', now_ms(), 'attempt', 0)
  redis.call('HDEL', key, 'lease_expires')
  redis.call('ZADD', 'vla:ready:' .. j.base_model, seq - tonumber(j.priority) * PRIORITY_STEP, args[1])
  redis.call('LPUSH', 'vla:wake:' .. j.base_model, 1)
  redis.call('LTRIM', 'vla:wake:' .. j.base_model, 0, 0)
  redis.call('EXPIRE', 'vla:wake:' .. j.base_model, 30)
  if redis.call('EXISTS', 'vla:draining:' .. j.base_model) == 1 then return 0 end
  return redis.call('SET', 'vla:hint:training:' .. j.base_model, 1, 'NX', 'PX', 5000) and 1 or 0
end

-- lease_group(worker, base_model, max_jobs, lease_ms): ready jobs of distinct policies, highest
-- priority first and FIFO within it, each the next position of its policy, whose slot is free or
-- ours. A job whose worker died before is leased alone, so that nobody is blamed twice.
local function lease_group(_, args)
  local worker, base, max_jobs, lease_ms = args[1], args[2], tonumber(args[3]), tonumber(args[4])
  local at, group = now_ms(), {}
  redis.call('SET', 'vla:draining:' .. base, worker, 'PX', 3000)
  for _, job_id in ipairs(redis.call('ZRANGE', 'vla:ready:' .. base, 0, 1023)) do
    local key = 'vla:j:' .. job_id
    local j = hash(key)
    local w = hash('vla:w:' .. j.workload)
    local policy = 'vla:policy:' .. j.policy_key
    local p = hash(policy)
    local mine = p.slot_owner == worker
    local free = not p.slot_owner or tonumber(p.slot_expires or 0) < at
    local attempts = tonumber(redis.call('HGET', 'vla:w:' .. j.workload .. ':attempts', j.position) or 0)
    local alone = attempts > 0
    if w.state == 'running' and j.position == w.position and (mine or free)
        and not (alone and #group > 0) then
      if attempts >= 3 then
        local why = cjson.encode({code = 'poison', message = 'position ' .. j.position ..
          ' ended its worker 3 times; the run is set aside'})
        end_workload(j.workload, w, 'failed', why)
      else
        local mount = 0
        if not mine then
          mount = 1
          redis.call('HINCRBY', policy, 'slot_fence', 1)
        end
        redis.call('HSET', policy, 'slot_owner', worker, 'slot_expires', at + lease_ms)
        local fence = redis.call('HINCRBY', key, 'fence', 1)
        redis.call('HSET', key, 'state', 'leased', 'lease_owner', worker, 'leased', at,
          'lease_expires', at + lease_ms, 'attempt', attempts + 1)
        redis.call('HINCRBY', 'vla:w:' .. j.workload .. ':attempts', j.position, 1)
        redis.call('ZREM', 'vla:ready:' .. base, job_id)
        redis.call('ZADD', 'vla:leases', at + lease_ms, job_id)
        local out = hash(key)
        out.mount = mount
        out.queue_wait_ms = at - tonumber(j.ready)
        out.slot_fence = redis.call('HGET', policy, 'slot_fence')
        out.base_version = w.base_version
        group[#group + 1] = out
        if alone or #group >= max_jobs then break end
      end
    end
  end
  if #group == 0 then return '[]' end
  return cjson.encode(group)
end

-- heartbeat(worker, lease_ms, job...): extends the worker's slots and the jobs it says it works on.
-- Returns those that are its own no longer: cancellation and lost leases travel back this way.
local function heartbeat(_, args)
  local worker, until_ms, gone = args[1], now_ms() + tonumber(args[2]), {}
  redis.call('SET', 'vla:worker:' .. worker, 1, 'PX', args[2])
  for _, id in ipairs(redis.call('SMEMBERS', 'vla:running')) do
    local policy = 'vla:policy:' .. redis.call('HGET', 'vla:w:' .. id, 'policy_key')
    if redis.call('HGET', policy, 'slot_owner') == worker then
      redis.call('HSET', policy, 'slot_expires', until_ms)
    end
  end
  for i = 3, #args do
    local key = 'vla:j:' .. args[i]
    if redis.call('HGET', key, 'state') == 'leased' and redis.call('HGET', key, 'lease_owner') == worker then
      redis.call('ZADD', 'vla:leases', until_ms, args[i])
      redis.call('HSET', key, 'lease_expires', until_ms)
    else
      gone[#gone + 1] = args[i]
    end
  end
  if #gone == 0 then return '[]' end
  return cjson.encode(gone)
end

-- leave(worker, policy_key or ''): gives slots back at once; all of a worker that stops in order,
-- or that of one policy whose state the worker does not trust any more.
local function leave(_, args)
  local left = 0
  for _, id in ipairs(redis.call('SMEMBERS', 'vla:running')) do
    local policy = 'vla:policy:' .. redis.call('HGET', 'vla:w:' .. id, 'policy_key')
    if redis.call('HGET', policy, 'slot_owner') == args[1]
        and (args[2] == '' or policy == 'vla:policy:' .. args[2]) then
      redis.call('HDEL', policy, 'slot_owner', 'slot_expires')
      left = left + 1
    end
  end
  return left
end

local function go_back(id, w, position, step)
  local key = 'vla:w:' .. id
  end_jobs(id, 'cancelled', 'rewound')
  for _, done in ipairs(redis.call('HKEYS', key .. ':steps')) do
    if tonumber(done) > step then redis.call('HDEL', key .. ':steps', done) end
  end
  redis.call('HSET', key, 'position', position, 'next_position', position, 'step', step)
  redis.call('HINCRBY', key, 'incarnation', 1)
  mirror(id, w)
end

-- rewind(workload, slot_fence, position, step, force): the slot was restored at `position`. What came
-- after died with its worker: outstanding jobs end, later steps leave the log, positions are redone.
-- With force also where the position agrees: the samples of its jobs are lost.
local function rewind(_, args)
  local id, position, step = args[1], tonumber(args[3]), tonumber(args[4])
  local key = 'vla:w:' .. id
  local w = hash(key)
  if w.state ~= 'running' then return refuse('LEASE_LOST', id) end
  local fence = redis.call('HGET', 'vla:policy:' .. w.policy_key, 'slot_fence')
  if fence ~= args[2] then return refuse('LEASE_LOST', id) end
  if tonumber(w.position) == position and args[5] ~= '1' then return 0 end
  go_back(id, w, position, step)
  return 1
end

-- complete(job, fence, slot_fence, step, result_json): leased -> completed; the effect is recorded
-- once. Returns how many jobs of the workload are in flight, and whether it is through.
local function complete(_, args)
  local job_id, fence, slot_fence, step = args[1], args[2], args[3], tonumber(args[4])
  local j = hash('vla:j:' .. job_id)
  if not held(j, fence, 'leased') then return refuse('LEASE_LOST', job_id) end
  if redis.call('HGET', 'vla:policy:' .. j.policy_key, 'slot_fence') ~= slot_fence then
    return refuse('LEASE_LOST', job_id)
  end
  local key = 'vla:w:' .. j.workload
  local w = hash(key)
  if j.position ~= w.position then return refuse('ILLEGAL', job_id .. ' is not the next position') end
  if step > tonumber(w.step) then
    redis.call('HSET', key .. ':steps', step, args[5])
    redis.call('HSET', 'vla:policy:' .. j.policy_key, 'policy_version',
      tonumber(w.base_version) + step)
  end
  redis.call('HSET', key, 'position', tonumber(j.position) + 1, 'step', step, 'updated', now_ms())
  redis.call('HDEL', key .. ':attempts', j.position)
  end_job(job_id, 'completed', '')
  mirror(j.workload, w)
  local in_flight = redis.call('SCARD', key .. ':jobs')
  redis.call('LPUSH', 'vla:room:' .. j.workload, 1)
  redis.call('LTRIM', 'vla:room:' .. j.workload, 0, 0)
  redis.call('EXPIRE', 'vla:room:' .. j.workload, 30)
  return cjson.encode({in_flight = in_flight, through = tonumber(j.position) + 1 >= tonumber(w.total_positions)})
end

-- release(job, fence): leased -> ready, unharmed (warm shutdown); the lease is not counted.
local function release(_, args)
  local key = 'vla:j:' .. args[1]
  local j = hash(key)
  if not held(j, args[2], 'leased') then return refuse('LEASE_LOST', args[1]) end
  redis.call('HSET', key, 'state', 'ready')
  redis.call('HDEL', key, 'lease_owner', 'lease_expires')
  redis.call('ZREM', 'vla:leases', args[1])
  redis.call('HINCRBY', 'vla:w:' .. j.workload .. ':attempts', j.position, -1)
  redis.call('ZADD', 'vla:ready:' .. j.base_model,
    tonumber(j.ready_seq) - tonumber(j.priority) * PRIORITY_STEP, args[1])
  return 1
end

-- checkpointed(workload, position, checkpoint, step): what is durable; moves forward only.
local function checkpointed(_, args)
  local key = 'vla:w:' .. args[1]
  local w = hash(key)
  if not w.state then return refuse('NOT_FOUND', args[1]) end
  if tonumber(args[2]) < tonumber(w.durable_position) then return 0 end
  redis.call('HSET', key, 'durable_position', args[2], 'checkpoint', args[3], 'durable_step', args[4])
  mirror(args[1], w)
  return 1
end

-- finish(workload, slot_fence): running -> succeeded, once every position is done and durable.
local function finish(_, args)
  local w = hash('vla:w:' .. args[1])
  if not w.state then return refuse('NOT_FOUND', args[1]) end
  if w.state == 'succeeded' then return 0 end
  if not allowed('workload', w.state, 'succeeded') then return refuse('ILLEGAL', w.state .. ' -> succeeded') end
  if tonumber(w.position) < tonumber(w.total_positions)
      or tonumber(w.durable_position) < tonumber(w.total_positions) then
    return refuse('ILLEGAL', args[1] .. ' is not through or not durable')
  end
  end_workload(args[1], w, 'succeeded', '')
  return 1
end

-- publish_version(policy_key, version, base_model): the version that inference serves by default;
-- it moves forward only. Returns the current one.
local function publish_version(_, args)
  local policy, version = 'vla:policy:' .. args[1], tonumber(args[2])
  local current = tonumber(redis.call('HGET', policy, 'current_version') or -1)
  if version <= current then return current end
  redis.call('HSET', policy, 'current_version', version)
  local tenant, name = string.match(args[1], '^([^/]+)/(.*)$')
  redis.call('HSET', 'vla:t:' .. tenant .. ':policies', name, args[3])
  redis.call('XADD', 'vla:published', 'MAXLEN', '~', 1000, '*', 'policy', args[1], 'version', version)
  return version
end

-- fail(workload, reason_json) and cancel(workload): final. Repeating them changes nothing.
local function stop(args, state, reason)
  local w = hash('vla:w:' .. args[1])
  if not w.state then return refuse('NOT_FOUND', args[1]) end
  if terminal('workload', w.state) then return w.state end
  end_workload(args[1], w, state, reason)
  return state
end
local function fail(_, args) return stop(args, 'failed', args[2]) end
local function cancel(_, args) return stop(args, 'cancelled', args[2] or '') end

-- reap(): expired leases return to ready. Returns what is due without a live message:
-- workloads to prepare, admit or produce for, and base models with ready jobs that nobody drains.
local function reap(_, _)
  local at = now_ms()
  local due = {prepare = {}, admit = {}, produce = {}, train = {}}
  for _, job_id in ipairs(redis.call('ZRANGEBYSCORE', 'vla:leases', '-inf', at)) do
    local key = 'vla:j:' .. job_id
    local j = hash(key)
    redis.call('ZREM', 'vla:leases', job_id)
    if j.state == 'leased' then
      redis.call('HSET', key, 'state', 'ready')
      redis.call('HINCRBY', key, 'fence', 1)
      redis.call('HDEL', key, 'lease_owner', 'lease_expires')
      redis.call('ZADD', 'vla:ready:' .. j.base_model,
        tonumber(j.ready_seq) - tonumber(j.priority) * PRIORITY_STEP, job_id)
    end
  end
  local pending = {}
  for _, id in ipairs(redis.call('SMEMBERS', 'vla:pending')) do
    local w = redis.call('HMGET', 'vla:w:' .. id, 'prepared', 'priority', 'created')
    pending[#pending + 1] = {id = id, prepared = w[1], priority = tonumber(w[2]), created = tonumber(w[3])}
  end
  -- Higher priority first, then whoever came first.
  table.sort(pending, function(a, b)
    if a.priority ~= b.priority then return a.priority > b.priority end
    if a.created ~= b.created then return a.created < b.created end
    return a.id < b.id
  end)
  for _, w in ipairs(pending) do
    local list = w.prepared == '1' and due.admit or due.prepare
    list[#list + 1] = w.id
  end
  local bases = {}
  for _, id in ipairs(redis.call('SMEMBERS', 'vla:running')) do
    local w = hash('vla:w:' .. id)
    local limit_ms = tonumber(w.max_seconds or 0) * 1000
    if limit_ms > 0 and at - tonumber(w.started) > limit_ms then
      end_workload(id, w, 'failed', cjson.encode({code = 'time_limit', message =
        'limits.max_seconds: the run took longer than ' .. w.max_seconds .. ' s'}))
    end
  end
  for _, id in ipairs(redis.call('SMEMBERS', 'vla:running')) do
    local w = hash('vla:w:' .. id)
    bases[w.base_model] = true
    local p = hash('vla:policy:' .. w.policy_key)
    if tonumber(w.position) >= tonumber(w.total_positions)
        and tonumber(w.durable_position) < tonumber(w.total_positions)
        and (not p.slot_owner or tonumber(p.slot_expires or 0) < at) then
      -- The worker died between the last step and its checkpoint: redo from the durable one.
      go_back(id, w, tonumber(w.durable_position), tonumber(w.durable_step))
      w = hash('vla:w:' .. id)
    end
    local room = redis.call('SCARD', 'vla:w:' .. id .. ':jobs') < tonumber(w.max_in_flight)
      and tonumber(w.next_position) < tonumber(w.total_positions)
    for _, job_id in ipairs(redis.call('SMEMBERS', 'vla:w:' .. id .. ':jobs')) do
      local j = hash('vla:j:' .. job_id)
      if j.state == 'reserved' and tonumber(j.lease_expires) < at then room = true end
    end
    if room and redis.call('EXISTS', 'vla:producing:' .. id) == 0 then
      due.produce[#due.produce + 1] = id
    end
  end
  for base, _ in pairs(bases) do
    if redis.call('EXISTS', 'vla:draining:' .. base) == 0
        and redis.call('ZCARD', 'vla:ready:' .. base) > 0 then
      due.train[#due.train + 1] = base
    end
  end
  for name, list in pairs(due) do if #list == 0 then due[name] = nil end end
  return cjson.encode(due)
end

redis.register_function('vla_submit', submit)
redis.register_function('vla_prepared', prepared)
redis.register_function('vla_admit', admit)
redis.register_function('vla_reserve', reserve)
redis.register_function('vla_mark_ready', mark_ready)
redis.register_function('vla_lease_group', lease_group)
redis.register_function('vla_heartbeat', heartbeat)
redis.register_function('vla_leave', leave)
redis.register_function('vla_rewind', rewind)
redis.register_function('vla_complete', complete)
redis.register_function('vla_release', release)
redis.register_function('vla_checkpointed', checkpointed)
redis.register_function('vla_finish', finish)
redis.register_function('vla_publish_version', publish_version)
redis.register_function('vla_fail', fail)
redis.register_function('vla_cancel', cancel)
redis.register_function('vla_reap', reap)
