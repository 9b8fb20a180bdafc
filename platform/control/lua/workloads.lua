-- submit(workload, fields_json, max_pending): nothing -> pending. The same id with the same spec
-- digest is the same submit.
local function submit(_, args)
  local id, fields = args[1], cjson.decode(args[2])
  local known = redis.call('HGET', 'vla:w:' .. id, 'spec_digest')
  if known then
    if known ~= fields.spec_digest then return refuse('CONFLICT', id) end
    return 0
  end
  local waiting = redis.call('SCARD', 'vla:tenant:' .. fields.tenant .. ':pending')
  if waiting >= tonumber(args[3]) then return refuse('QUOTA', waiting .. ' runs are waiting') end
  local at = now_ms()
  for k, v in pairs(fields) do set_workload(id, fields.tenant, k, tostring(v)) end
  set_workload(id, fields.tenant, 'id', id, 'created', at, 'position', 0, 'step', 0,
    'next_position', 0, 'incarnation', 0, 'durable_position', 0, 'durable_step', 0, 'prepared', 0)
  redis.call('ZADD', 'vla:t:' .. fields.tenant .. ':workloads', at, id)
  remember_policy(fields.policy_key, fields.base_model, false)
  record(id, fields, 'pending', '')
  return 1
end

-- restore(workload, fields_json, recorded): nothing -> any state, from what the object store says of it. Every
-- fence and name starts anew above those from before, so that no late write of then can fit.
local function restore(_, args)
  local id, fields = args[1], cjson.decode(args[2])
  if redis.call('EXISTS', 'vla:w:' .. id) == 1 then return 0 end
  local at = now_ms()
  local epoch = math.floor(at / 1000)
  local state = fields.state
  for k, v in pairs(fields) do set_workload(id, fields.tenant, k, tostring(v)) end
  set_workload(id, fields.tenant, 'id', id, 'next_position', fields.position, 'incarnation', epoch,
    'durable_position', fields.position, 'durable_step', fields.step)
  redis.call('ZADD', 'vla:t:' .. fields.tenant .. ':workloads', fields.created, id)
  local policy = 'vla:policy:' .. fields.policy_key
  redis.call('HSETNX', policy, 'slot_fence', epoch)
  local version = tonumber(redis.call('HGET', policy, 'policy_version') or 0)
  version = math.max(version, tonumber(fields.policy_version))
  redis.call('HSET', policy, 'policy_version', version)
  local published = tonumber(redis.call('HGET', policy, 'current_version') or 0)
  published = math.max(published, tonumber(fields.published_version))
  if published > 0 then redis.call('HSET', policy, 'current_version', published) end
  remember_policy(fields.policy_key, fields.base_model,
    published > 0 and published == tonumber(fields.published_version))
  record(id, fields, state, fields.reason or '')
  if args[3] == '1' then redis.call('LREM', 'vla:ended', 1, id) end
  return 1
end

-- prepared(workload, total_positions, total_steps): pending; the data was opened and measured.
local function prepared(_, args)
  local w = hash('vla:w:' .. args[1])
  if not w.state then return refuse('NOT_FOUND', args[1]) end
  if w.state ~= 'pending' then return 0 end
  set_workload(args[1], w.tenant, 'prepared', 1, 'total_positions', args[2], 'total_steps', args[3])
  return 1
end

-- admit(workload, max_running): pending -> running when its policy is free and the tenant has room.
-- Returns the state it is in, or why it waits.
local function admit(_, args)
  local id = args[1]
  local w = hash('vla:w:' .. id)
  if not w.state then return refuse('NOT_FOUND', id) end
  if w.state ~= 'pending' then return w.state end
  local function waits(why)
    set_workload(id, w.tenant, 'waits', why)
    return 'waits: ' .. why
  end
  if w.prepared ~= '1' then return waits('data is being prepared') end
  local policy = 'vla:policy:' .. w.policy_key
  local other = redis.call('HGET', policy, 'workload')
  if other and other ~= id then return waits(other .. ' trains this policy') end
  local running = redis.call('SCARD', 'vla:tenant:' .. w.tenant .. ':running')
  if running >= tonumber(args[2]) then return waits(running .. ' runs of this tenant are running') end
  redis.call('HSET', policy, 'workload', id)
  redis.call('HSETNX', policy, 'policy_version', 0)
  if not w.base_version then
    set_workload(id, w.tenant, 'base_version', redis.call('HGET', policy, 'policy_version'))
  end
  if not w.started then set_workload(id, w.tenant, 'started', now_ms()) end
  joins(w.tenant)
  record(id, w, 'running', '')
  return 'running'
end

-- pause(workload): running -> paused: nothing new is reserved, what is in flight ends.
-- resume(workload): paused -> running.
local function shift(args, from, to)
  local w = hash('vla:w:' .. args[1])
  if not w.state then return refuse('NOT_FOUND', args[1]) end
  if w.state == to then return 0 end
  if w.state ~= from or not allowed('workload', w.state, to) then
    return refuse('ILLEGAL', w.state .. ' -> ' .. to)
  end
  record(args[1], w, to, '')
  if to == 'running' then joins(w.tenant) else leaves(w.tenant) end
  return 1
end
local function pause(_, args) return shift(args, 'running', 'paused') end
local function resume(_, args) return shift(args, 'paused', 'running') end

-- checkpointed(workload, position, checkpoint, step): what is durable; moves forward only. For RL it
-- is also what rollouts may use from now on.
local function checkpointed(_, args)
  local id = args[1]
  local w = hash('vla:w:' .. id)
  if not w.state then return refuse('NOT_FOUND', id) end
  if tonumber(args[2]) < tonumber(w.durable_position) then return 0 end
  set_workload(id, w.tenant, 'durable_position', args[2], 'checkpoint', args[3],
    'durable_step', args[4])
  wake('vla:room:' .. id)
  return 1
end

-- publish_version(policy_key, version, base_model): the version that inference serves by default;
-- it moves forward only. Returns the current one.
local function publish_version(_, args)
  local policy, version = 'vla:policy:' .. args[1], tonumber(args[2])
  local current = tonumber(redis.call('HGET', policy, 'current_version') or -1)
  if version <= current then return current end
  redis.call('HSET', policy, 'current_version', version)
  remember_policy(args[1], args[3], true)
  redis.call('XADD', 'vla:published', 'MAXLEN', '~', 1000, '*', 'policy', args[1], 'version', version)
  return version
end

-- finish(workload): running, paused -> succeeded, once everything is done and durable.
local function finish(_, args)
  local w = hash('vla:w:' .. args[1])
  if not w.state then return refuse('NOT_FOUND', args[1]) end
  if w.state == 'succeeded' then return 0 end
  if not allowed('workload', w.state, 'succeeded') then
    return refuse('ILLEGAL', w.state .. ' -> succeeded')
  end
  if not through(w, tonumber(w.position), tonumber(w.step))
      or not through(w, tonumber(w.durable_position), tonumber(w.durable_step)) then
    return refuse('ILLEGAL', args[1] .. ' is not through or not durable')
  end
  end_workload(args[1], w, 'succeeded', '')
  return 1
end

-- fail(workload, reason_json), cancel(workload, reason_json): any -> failed, cancelled. Final;
-- repeating them changes nothing. Return the state it ended in.
local function stop(args, state, reason)
  local w = hash('vla:w:' .. args[1])
  if not w.state then return refuse('NOT_FOUND', args[1]) end
  if terminal('workload', w.state) then return w.state end
  end_workload(args[1], w, state, reason)
  return state
end
local function fail(_, args) return stop(args, 'failed', args[2]) end
local function cancel(_, args) return stop(args, 'cancelled', args[2] or '') end
