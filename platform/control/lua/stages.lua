local function drop_job(job_id, j, reason)
  end_job(job_id, 'dropped', reason, j)
  redis.call('HINCRBY', 'vla:usage:' .. j.tenant_id, 'dropped:' .. j.policy_key .. ':' .. reason, 1)
  local w = hash('vla:w:' .. j.workload)
  redis.call('HINCRBY', 'vla:w:' .. j.workload, 'dropped', 1)
  redis.call('HINCRBY', 'vla:t:' .. j.tenant_id .. ':w:' .. j.workload, 'dropped', 1)
  local in_row = redis.call('HINCRBY', 'vla:w:' .. j.workload, 'dropped_in_row', 1)
  if w.max_dropped and in_row >= tonumber(w.max_dropped) then
    return end_workload(j.workload, w, 'failed', cjson.encode({code = 'nothing_to_learn', message =
      in_row .. ' rollouts in a row taught nothing; the last one: ' .. reason}))
  end
  redis.call('SADD', 'vla:w:' .. j.workload .. ':gone', j.position)
  local position = tonumber(w.position)
  while redis.call('SREM', 'vla:w:' .. j.workload .. ':gone', position) == 1 do
    position = position + 1
  end
  if position ~= tonumber(w.position) then
    advance(j.workload, w, position, w.step, now_ms())
  end
end

-- A job joins the queue of the stage that it needs. Returns 1 where a hint is due.
local function await_stage(job_id, j, stage)
  local place = stage_place(stage, j)
  local queue = stage_key(stage, place)
  redis.call('ZADD', queue, rank(j, j.created_seq), job_id)
  if stage == 'scores' then
    local within_ms = redis.call('HGET', 'vla:j:' .. job_id, 'score_within_ms')
    redis.call('ZADD', 'vla:deadlines', now_ms() + tonumber(within_ms), job_id)
  end
  wake('vla:wake:' .. (place ~= '' and place or stage))
  return redis.call('SET', 'vla:hint:' .. queue, 1, 'NX', 'PX', 1000) and 1 or 0
end

-- Nobody scored a job in time, or who tried cannot: what its spec says of that happens, and counts.
local function give_up_scores(job_id, j, why)
  local key = 'vla:j:' .. job_id
  local policy = redis.call('HGET', key, 'on_unscored')
  redis.call('HINCRBY', 'vla:usage:' .. j.tenant_id, 'unscored:' .. j.policy_key .. ':' .. policy, 1)
  redis.call('HINCRBY', 'vla:w:' .. j.workload, 'unscored', 1)
  redis.call('HINCRBY', 'vla:t:' .. j.tenant_id .. ':w:' .. j.workload, 'unscored', 1)
  redis.call('XADD', 'vla:t:' .. j.tenant_id .. ':w:' .. j.workload .. ':events',
    'MAXLEN', '~', 100000, '*', 'event', cjson.encode({kind = 'unscored', at = now_ms(),
    position = tonumber(j.position), reason = why, outcome = policy}))
  if policy == 'drop' then return drop_job(job_id, j, 'unscored') end
  if policy == 'fail' then
    return end_workload(j.workload, hash('vla:w:' .. j.workload), 'failed', cjson.encode({
      code = 'unscored', message = 'position ' .. j.position .. ' has no scores: ' .. why}))
  end
  unlist(job_id, j)
  local after = TABLES[j.lifecycle]['computing_scores'][1]
  redis.call('HINCRBY', key, 'fence', 1) -- who still scores it is too late
  redis.call('HSET', key, 'state', after, 'attempt', 0, 'lease_owner', '', 'lease_expires', 0)
  await_stage(job_id, j, string.sub(after, #'needs_' + 1))
end
