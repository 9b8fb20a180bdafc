-- What the ledger's operations share. Keys:
--
--   vla:w:<workload>             hash   workload (state, policy, position, step, ...)
--   vla:w:<workload>:history     list   {"state","at","reason"} per transition
--   vla:w:<workload>:jobs        zset   its training jobs that are not terminal -> when a silent
--                                       producer loses them (ms); infinite once produced
--   vla:w:<workload>:steps       hash   optimizer step -> result of the job that made it
--   vla:w:<workload>:attempts    hash   position -> failed leases of that position
--   vla:t:<tenant>:workloads     zset   workload -> created (ms); the tenant may read vla:t:<tenant>:*
--   vla:t:<tenant>:w:<workload>  hash   the tenant's view of its workload
--   vla:j:<job>                  hash   training-job descriptor
--   vla:pending, :running, :paused  set workloads in that state
--   vla:tenant:<tenant>:pending, :running, :rollouts   set; what the tenant's limits count
--   vla:weights                  hash   tenant -> its share; 1 where absent
--   vla:charged                  zset   tenants with running workloads -> cost (s) / weight
--   vla:owed                     zset   tenants without: what they were charged when they left
--   vla:usage:<tenant>           hash   worker_s, samples, jobs, dropped:<policy>:<reason>
--   vla:use:<tenant>:<day>       hash   <policy>|<workload>|<what> -> amount; see usage.py
--   vla:rollouts                 set    jobs whose environments step now
--   vla:policy:<policy_key>      hash   running workload, policy_version, slot owner and fence
--   vla:workers                  zset   training worker -> when it counts as dead (ms)
--   vla:slots:<worker>           set    policies whose slots it owns
--   vla:t:<tenant>:policies      hash   policy -> base model
--   vla:published                stream policy, version: notices of new current versions
--   vla:ready:<base>             zset   next job of each policy whose slot is free -> rank
--   vla:ready:<base>:<worker>    zset   the same for policies whose slot that worker owns
--   vla:stage:<stage>[:<base>]   zset   jobs that wait for a stage -> rank
--   vla:deadlines                zset   jobs without scores -> when they are given up (ms)
--   vla:leases                   zset   job -> lease_expires (ms), for stages and training
--   vla:w:<workload>:gone        set    positions that were dropped before their turn
--   vla:wake:*, vla:room:*       list   one token, for those who block until something changes
--   vla:hint:*, vla:draining:*, vla:producing:*   string   who is known to look; expire
--   vla:bases, vla:seq:*, vla:chore:*   what workers serve; counters; who did a chore last
--   vla:clear                    list   partitions whose payload is due for clearing
--   vla:ended                    list   workloads whose outcome is due in the object store

local TABLES = @TABLES@
local WAITS = @WAITS@
local RETENTION_S = 24 * 3600
local LOG_RETENTION_S = 7 * 24 * 3600
local PRIORITY_STEP = 1e12
local MOST_ATTEMPTS = 3
local MOST_BACKOFF_MS = 300000

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000) + @CLOCK@
end

local function hash(key)
  local flat, out = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do out[flat[i]] = flat[i + 1] end
  return out
end

-- Where a policy is served: by the base model of its published version; of one that has published
-- nothing yet, by that of its first run.
local function remember_policy(policy_key, base_model, is_published)
  local tenant, name = string.match(policy_key, '^([^/]+)/(.*)$')
  local set = is_published and 'HSET' or 'HSETNX'
  redis.call(set, 'vla:t:' .. tenant .. ':policies', name, base_model)
end

-- Some fields of a hash: what most operations need of a job costs half of all of them.
local function pick(key, names)
  local values, out = redis.call('HMGET', key, unpack(names)), {}
  for i, name in ipairs(names) do out[name] = values[i] or nil end
  return out
end

local JOB = {'state', 'fence', 'workload', 'tenant_id', 'policy_key', 'task_type', 'lifecycle',
  'base_model', 'partition_id', 'position', 'priority', 'created_seq', 'ready_seq', 'lease_owner',
  'lease_expires', 'scored_by'}

local function job_of(job_id) return pick('vla:j:' .. job_id, JOB) end

local function refuse(code, text) return redis.error_reply('VLA_' .. code .. ' ' .. text) end

local function allowed(kind, from, to)
  for _, state in ipairs(TABLES[kind][from] or {}) do if state == to then return true end end
  return false
end

local function terminal(kind, state) return #(TABLES[kind][state] or {}) == 0 end

local function list(items)
  if #items == 0 then return '[]' end
  return cjson.encode(items)
end

-- The tenant reads a copy under its own prefix: its ACL never reaches the platform's keys.
local function set_workload(id, tenant, ...)
  redis.call('HSET', 'vla:w:' .. id, ...)
  redis.call('HSET', 'vla:t:' .. tenant .. ':w:' .. id, ...)
end

local function record(id, w, state, reason)
  local at = now_ms()
  set_workload(id, w.tenant, 'state', state, 'updated', at, 'waits', '')
  if reason ~= '' then set_workload(id, w.tenant, 'reason', reason) end
  local line = cjson.encode({state = state, at = at, reason = reason})
  redis.call('RPUSH', 'vla:w:' .. id .. ':history', line)
  redis.call('RPUSH', 'vla:t:' .. w.tenant .. ':w:' .. id .. ':history', line)
  for _, set in ipairs({'pending', 'running', 'paused'}) do
    local change = state == set and 'SADD' or 'SREM'
    redis.call(change, 'vla:' .. set, id)
    redis.call(change, 'vla:tenant:' .. w.tenant .. ':' .. set, id)
  end
  if terminal('workload', state) then redis.call('RPUSH', 'vla:ended', id) end
  redis.call('XADD', 'vla:t:' .. w.tenant .. ':w:' .. id .. ':events', 'MAXLEN', '~', 100000, '*',
    'event', cjson.encode({kind = 'state', state = state, at = at, reason = reason}))
end

-- Training order: higher priority first, RL before SFT within it, then first ready first.
local function rank(j, seq)
  local class = 2 * tonumber(j.priority) + (j.task_type == 'rl' and 1 or 0)
  return tonumber(seq) - class * PRIORITY_STEP
end

local function wake(key)
  if redis.call('EXISTS', key) == 1 then return end
  redis.call('LPUSH', key, 1)
  redis.call('EXPIRE', key, 30)
end

local function ready_key(j)
  local owner = redis.call('HGET', 'vla:policy:' .. j.policy_key, 'slot_owner')
  return 'vla:ready:' .. j.base_model .. (owner and ':' .. owner or '')
end

-- A ready job joins its queue once it is the next position of its policy.
local function enqueue(job_id, known)
  local j = known or job_of(job_id)
  if j.state ~= 'ready' then return end
  if redis.call('HGET', 'vla:w:' .. j.workload, 'position') ~= j.position then return end
  redis.call('ZADD', ready_key(j), rank(j, j.ready_seq), job_id)
  wake('vla:wake:' .. j.base_model)
end

-- Whose stage it is: the worker of a base model, or '' for any worker of the stage's queue.
local function stage_place(stage, j)
  if stage == 'actor_forward' then return j.base_model end
  return stage == 'scores' and j.scored_by or ''
end

local function stage_key(stage, place)
  return 'vla:stage:' .. stage .. (place ~= '' and ':' .. place or '')
end

-- Takes a job out of the index of the state it was in.
local function unlist(job_id, j)
  if j.state == 'ready' then
    redis.call('ZREM', ready_key(j), job_id)
  elseif j.state ~= 'reserved' then
    local stage = string.match(j.state, '^needs_(.*)$')
    local waits = stage and stage_key(stage, stage_place(stage, j))
    redis.call('ZREM', waits or 'vla:leases', job_id)
    if j.scored_by then redis.call('ZREM', 'vla:deadlines', job_id) end
  elseif j.task_type == 'rl' then
    redis.call('SREM', 'vla:rollouts', job_id)
    redis.call('SREM', 'vla:tenant:' .. j.tenant_id .. ':rollouts', job_id)
  end
end

local function end_job(job_id, state, reason, known, at)
  local key = 'vla:j:' .. job_id
  local j = known or job_of(job_id)
  redis.call('HSET', key, 'state', state, 'terminal_reason', reason,
    'ended', at or now_ms())
  redis.call('EXPIRE', key, RETENTION_S)
  unlist(job_id, j)
  redis.call('ZREM', 'vla:w:' .. j.workload .. ':jobs', job_id)
  redis.call('RPUSH', 'vla:clear', j.partition_id .. ' ' .. j.tenant_id)
  wake('vla:room:' .. j.workload)
end

local function end_jobs(id, state, reason)
  for _, job_id in ipairs(redis.call('ZRANGE', 'vla:w:' .. id .. ':jobs', 0, -1)) do
    end_job(job_id, state, reason)
  end
end

local function free_slot(policy_key)
  local policy = 'vla:policy:' .. policy_key
  local owner, workload = unpack(redis.call('HMGET', policy, 'slot_owner', 'workload'))
  if not owner then return end
  redis.call('HDEL', policy, 'slot_owner')
  redis.call('SREM', 'vla:slots:' .. owner, policy_key)
  if not workload then return end
  local base, position, incarnation = unpack(redis.call('HMGET', 'vla:w:' .. workload,
    'base_model', 'position', 'incarnation'))
  local job_id = workload .. '-' .. position .. '-' .. incarnation
  redis.call('ZREM', 'vla:ready:' .. base .. ':' .. owner, job_id)
  enqueue(job_id)
end

-- Tenants pay by measured cost. Who comes back keeps what it owes, and does not collect what it did
-- not use: it is charged at least what the least charged of those present is.
local function joins(tenant)
  if redis.call('ZSCORE', 'vla:charged', tenant) then return end
  local least = redis.call('ZRANGE', 'vla:charged', 0, 0, 'WITHSCORES')
  local owed = redis.call('ZSCORE', 'vla:owed', tenant) or 0
  redis.call('ZADD', 'vla:charged', math.max(tonumber(least[2] or 0), tonumber(owed)), tenant)
end

local function leaves(tenant)
  if redis.call('SCARD', 'vla:tenant:' .. tenant .. ':running') > 0 then return end
  local owed = redis.call('ZSCORE', 'vla:charged', tenant)
  if owed then redis.call('ZADD', 'vla:owed', owed, tenant) end
  redis.call('ZREM', 'vla:charged', tenant)
end

local function end_workload(id, w, state, reason)
  end_jobs(id, state == 'cancelled' and 'cancelled' or 'failed', reason)
  record(id, w, state, reason)
  local policy = 'vla:policy:' .. w.policy_key
  if redis.call('HGET', policy, 'workload') == id then
    redis.call('HDEL', policy, 'workload')
    free_slot(w.policy_key)
  end
  leaves(w.tenant)
  -- What it was and how it ended stays, in the object store too; its log does not fill the server.
  for _, name in ipairs({':steps', ':attempts', ':gone'}) do
    redis.call('EXPIRE', 'vla:w:' .. id .. name, LOG_RETENTION_S)
  end
  redis.call('EXPIRE', 'vla:t:' .. w.tenant .. ':w:' .. id .. ':events', LOG_RETENTION_S)
end

local function poison(job_id, j, what)
  local why = cjson.encode({code = 'poison', message = 'position ' .. j.position .. ' ended its ' ..
    what .. ' ' .. MOST_ATTEMPTS .. ' times; the run is set aside'})
  end_workload(j.workload, hash('vla:w:' .. j.workload), 'failed', why)
end

local function holds(j, fence, state) return j.state == state and j.fence == fence end

-- The workload's next position, whatever became of the one before.
local function advance(id, w, position, step, at)
  set_workload(id, w.tenant, 'position', position, 'step', step, 'updated', at)
  enqueue(id .. '-' .. position .. '-' .. w.incarnation)
end

local function through(w, position, step)
  if w.target == 'steps' then return step >= tonumber(w.total_steps) end
  return position >= tonumber(w.total_positions)
end

-- '2026-11' for a day counted from 1970-01-01 (H. Hinnant, "chrono-compatible low-level date
-- algorithms", civil_from_days).
local function month_of(day)
  local z = day + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524)
    - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  return string.format('%04d-%02d', yoe + era * 400 + (month <= 2 and 1 or 0), month)
end

-- What tenants use by day, policy and workload, and by month; see usage.py.
local function use(tenant, policy_key, workload, amounts)
  local day = math.floor(now_ms() / 86400000)
  local key, month = 'vla:use:' .. tenant .. ':' .. day, 'vla:use:' .. tenant .. ':' .. month_of(day)
  local place = (string.match(policy_key, '^[^/]+/(.*)$') or policy_key) .. '|' .. workload .. '|'
  for what, amount in pairs(amounts) do
    redis.call('HINCRBYFLOAT', key, place .. what, amount)
    redis.call('HINCRBYFLOAT', key, '||' .. what, amount)
    redis.call('HINCRBYFLOAT', month, what, amount)
  end
  redis.call('EXPIRE', key, 40 * 86400)
  redis.call('EXPIRE', month, 40 * 86400)
end

local function charge(tenant, cost_s, samples, policy_key, workload)
  local weight = tonumber(redis.call('HGET', 'vla:weights', tenant) or 1)
  redis.call('ZADD', 'vla:charged', 'XX', 'INCR', cost_s / weight, tenant)
  redis.call('HINCRBYFLOAT', 'vla:usage:' .. tenant, 'worker_s', cost_s)
  redis.call('HINCRBY', 'vla:usage:' .. tenant, 'samples', samples)
  redis.call('HINCRBY', 'vla:usage:' .. tenant, 'jobs', 1)
  use(tenant, policy_key, workload, {worker_s = cost_s, samples = samples, jobs = 1})
end

-- A worker that went silent: what it held can be leased by others.
local function bury(worker)
  for _, policy_key in ipairs(redis.call('SMEMBERS', 'vla:slots:' .. worker)) do
    free_slot(policy_key)
  end
  redis.call('DEL', 'vla:slots:' .. worker)
  redis.call('ZREM', 'vla:workers', worker)
end

local function bury_silent(at)
  local silent = redis.call('ZRANGEBYSCORE', 'vla:workers', '-inf', at, 'LIMIT', 0, 16)
  for _, worker in ipairs(silent) do bury(worker) end
end
