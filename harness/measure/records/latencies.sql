-- Each answered request with its latencies in ns. $ENGINE_SUFFIX: what an engine adds to the id of a request.
with first_tokens as (
    select experiment, condition, replicate, session, request, min(at_ns) as first_ns, max(at_ns) as last_ns,
        arg_min(coalesce(earliest_ns, at_ns), row(at_ns, chunk)) as first_earliest_ns,
        arg_max(coalesce(earliest_ns, at_ns), row(at_ns, chunk)) as last_earliest_ns
    from (select *, coalesce(kernel_ns, received_ns) as at_ns from chunks) where num_tokens > 0 group by all
), admissions as (
    select experiment, condition, replicate, regexp_replace(request_id, '$ENGINE_SUFFIX', '') as response_id,
        min(log_ns) as admitted_ns
    from kv_events where kind = 'alloc' group by all
)
select r.experiment, r.condition, r.replicate, r.is_valid, r.session, r.request,
    case when r.cached_tokens > 0 then 'reused' when r.request = 0 then 'first'
        when r.cached_tokens is null then 'unknown' else 'recomputed' end as prefix,
    case when a.admitted_ns is not null then greatest(a.admitted_ns - r.sent_ns, 0) end as queue_ns,
    case when is_streamed then t.first_ns - r.sent_ns end as ttft_ns,
    case when is_streamed and r.completion_tokens > 1
        then (t.last_ns - t.first_ns)::double / (r.completion_tokens - 1) end as tpot_ns,
    case when is_streamed and t.first_earliest_ns < t.first_ns then t.first_earliest_ns - r.sent_ns
        end as ttft_at_least_ns,
    case when is_streamed and r.completion_tokens > 1 and t.last_earliest_ns < t.last_ns
        then greatest(t.last_earliest_ns - t.first_ns, 0)::double / (r.completion_tokens - 1) end as tpot_at_least_ns,
    case when is_streamed and r.completion_tokens > 1 and t.first_earliest_ns < t.first_ns
        then (t.last_ns - t.first_earliest_ns)::double / (r.completion_tokens - 1) end as tpot_at_most_ns,
    r.done_ns - r.sent_ns as e2e_ns, r.prompt_tokens, r.cached_tokens, r.completion_tokens
from requests r
join (select experiment, condition, replicate,
        coalesce(json_extract(requested, '$.client.stream')::boolean, true) as is_streamed from runs) s
    using (experiment, condition, replicate)
left join first_tokens t using (experiment, condition, replicate, session, request)
left join admissions a using (experiment, condition, replicate, response_id)
where r.status = 'ok'
