-- Each session, or the whole that it is a part of, with its instants in ns.
with parts as (
    select experiment, condition, replicate, unnest(range(len(parts))) as session, unnest(parts) as part
    from (select *, parts_of(place) as parts from internal.plans)
), last_tokens as (
    select experiment, condition, replicate, session, request, max(coalesce(kernel_ns, received_ns)) as token_ns
    from chunks where num_tokens > 0 group by all
), timed as (
    select r.*, part.whole, part.is_whole, coalesce(sent_ns, due_ns) as left_ns, coalesce(done_ns, due_ns) as ended_ns,
        case when is_streamed then token_ns end as token_ns
    from requests r
    join parts using (experiment, condition, replicate, session)
    join (select experiment, condition, replicate,
            coalesce(json_extract(requested, '$.client.stream')::boolean, true) as is_streamed from runs) s
        using (experiment, condition, replicate)
    left join last_tokens t using (experiment, condition, replicate, session, request)
), in_order as (
    select *, max(ended_ns) over (partition by experiment, condition, replicate, whole order by due_ns
        rows between unbounded preceding and 1 preceding) as before_ns from timed
), whole as (
    select experiment, condition, replicate, is_valid, whole as session, count(*) as num_requests,
        min(due_ns) as due_ns, min(left_ns) as first_ns, max(ended_ns) as done_ns,
        arg_max(coalesce(token_ns, ended_ns), row(ended_ns, session, request)) as token_ns,
        coalesce(sum(greatest(due_ns - before_ns, 0)), 0)::bigint as wait_ns,
        case when bool_or(status not in ('ok', 'aborted')) then 'failed'
            when arg_max(status, row(ended_ns, session, request)) = 'aborted' then 'left'
            else 'finished' end as outcome,
        bool_and(is_whole) as is_whole
    from in_order group by experiment, condition, replicate, is_valid, whole
)
select experiment, condition, replicate, is_valid, session::integer as session, num_requests, due_ns, first_ns, last_ns,
    wait_ns, case when outcome = 'finished' then last_ns - first_ns - wait_ns end as own_ns, outcome, is_whole
from (select *, case when outcome = 'finished' then token_ns else done_ns end as last_ns from whole)
