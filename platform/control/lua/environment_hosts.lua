-- Environment hosts in the control Redis. One hash per host, `vla:env:host:<id>`:
-- harness, capacity, in_flight, expires (server milliseconds), accepting. How many of those in
-- flight are whose stands beside it: `vla:env:tenants:<id>`, tenant to count.
-- Set per harness, `vla:env:hosts:<harness>`: ids of its hosts.
-- ARGV[1] names the operation.

local function now_ms()
    local time = redis.call('TIME')
    return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local operation = ARGV[1]

if operation == 'announce' then
    -- A host says that it lives and what it carries; its own count replaces what was assigned.
    local id, harness = ARGV[2], ARGV[3]
    local key = 'vla:env:host:' .. id
    redis.call('HSET', key, 'harness', harness, 'capacity', ARGV[4], 'in_flight', ARGV[5],
        'expires', now_ms() + tonumber(ARGV[6]), 'accepting', ARGV[7])
    redis.call('PEXPIRE', key, 10 * tonumber(ARGV[6]))
    local tenants = 'vla:env:tenants:' .. id
    redis.call('DEL', tenants)
    for at = 8, #ARGV, 2 do
        redis.call('HSET', tenants, ARGV[at], ARGV[at + 1])
    end
    redis.call('PEXPIRE', tenants, 10 * tonumber(ARGV[6]))
    redis.call('SADD', 'vla:env:hosts:' .. harness, id)
    return 1
end

if operation == 'assign' then
    -- The live host with the fewest instances in flight and room for one more, or nothing.
    -- With a tenant: 'quota' where its instances on all live hosts would be more than it may have.
    local harness, tenant = ARGV[2], ARGV[3]
    local now, chosen, fewest, theirs = now_ms(), false, nil, 0
    local ids = redis.call('SMEMBERS', 'vla:env:hosts:' .. harness)
    table.sort(ids)
    for _, id in ipairs(ids) do
        local host = redis.call('HMGET', 'vla:env:host:' .. id,
            'expires', 'in_flight', 'capacity', 'accepting')
        if not host[1] then
            redis.call('SREM', 'vla:env:hosts:' .. harness, id)
        elseif tonumber(host[1]) > now then
            theirs = theirs + tonumber(redis.call('HGET', 'vla:env:tenants:' .. id, tenant) or 0)
            local carried = tonumber(host[2])
            if host[4] == '1' and carried < tonumber(host[3])
                and (fewest == nil or carried < fewest) then
                chosen, fewest = id, carried
            end
        end
    end
    if tenant ~= '' and theirs >= tonumber(ARGV[4]) then
        return {'quota', theirs}
    end
    if not chosen then
        return {'full'}
    end
    redis.call('HINCRBY', 'vla:env:host:' .. chosen, 'in_flight', 1)
    if tenant ~= '' then
        redis.call('HINCRBY', 'vla:env:tenants:' .. chosen, tenant, 1)
    end
    return {'host', chosen}
end

if operation == 'withdraw' then
    redis.call('DEL', 'vla:env:host:' .. ARGV[2], 'vla:env:tenants:' .. ARGV[2])
    redis.call('SREM', 'vla:env:hosts:' .. ARGV[3], ARGV[2])
    return 1
end

return redis.error_reply('unknown operation ' .. operation)
