"""Simulation cases as JSON lines, one case in and one result out, so that others can check the simulator.

A bad case gives a line with an error and does not end the others. The same line gives the same result on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from harness.cli.terminal import print_answers
from harness.clock import NS_PER_S
from harness.compiled.records import IntArray, Records, record_as_dict
from harness.errors import HarnessError
from harness.model.engine.config import PAGED_BLOCK_TOKENS, EngineConfig
from harness.model.engine.cost import FS_PER_S, CostModel, check_magnitudes, to_fs
from harness.model.engine.scheduler import STEP_KINDS
from harness.model.engine.state import STEP_DECODE
from harness.model.plan.model import RequestPlan, SessionPlan
from harness.model.sim.draws import Draws, Perturbation, draw, run_draws
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.plans import check_slots, one_plan, session_arrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import RulesName, ServerSpec
from harness.model.spec.server import keys_of
from harness.processes import parallel_map
from harness.stacks.rbln.rules.kv_rules import AUTO, rule_set

LONGEST_S = 1e8
LARGEST_SEED = 2**63 - 1
BATCH = 128


REQUEST_COLUMNS = (
    *("session", "request", "prompt_tokens", "cached_tokens"),
    *("arrival_s", "admitted_s", "first_token_s", "completed_s"),
)
FIGURES = ("requests", "decode_steps", "decode_s", "prefill_s", "device_s", "wait_session_s", "evictions")
FIELDS = (*FIGURES, *(f"requests.{column}" for column in REQUEST_COLUMNS))


def _known_field(name: str) -> str:
    if name not in FIELDS:
        *others, last = map(repr, FIELDS)
        raise ValueError(f"Input should be {', '.join(others)} or {last}")
    return name


def _number(value: Any) -> Any:
    """Accept only JSON numbers: "500" and true are mistakes, not 500 and 1."""
    if isinstance(value, bool | str):
        raise ValueError(f"must be a number, got {json.dumps(value)}")
    return value


Whole = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class CaseRequest(_Part):
    """One request; ``wait_s`` follows it."""

    new_tokens: Whole = Field(ge=0, le=1 << 20)
    generate: Whole = Field(ge=1, le=1 << 20)
    wait_s: Real = Field(default=0.0, ge=0, le=LONGEST_S)


class CaseSession(_Part):
    """A session that starts at ``start_s``, or so long after session ``after`` ended."""

    start_s: Real = Field(default=0.0, ge=0, le=LONGEST_S)
    after: Annotated[Whole, Field(ge=0)] | None = None
    requests: tuple[CaseRequest, ...] = Field(min_length=1)


class CaseConfig(_Part):
    """Keys of a ServerSpec, three with shorter names in JSON.

    kv_slots: not under paged rules; the last five: only there.
    """

    decode_buckets: tuple[Whole, ...] = Field(min_length=1, alias="buckets")
    max_num_seqs: Whole = Field(ge=1, le=4096, alias="limit")
    kv_slots: Whole | None = Field(default=None, ge=1, le=4096, alias="slots")
    slot_tokens: Whole = Field(default=8192, ge=128, le=1 << 20)
    num_gpu_blocks: Whole | None = Field(default=None, ge=2, le=1 << 20)
    block_size: Whole | None = Field(default=None, ge=1, le=1 << 20)
    max_num_batched_tokens: Whole | None = Field(default=None, ge=1, le=1 << 20)
    long_prefill_tokens: Whole | None = Field(default=None, ge=0, le=1 << 20)
    async_scheduling: bool | None = None


class CasePrefill(_Part):
    per_chunk_s: Real = Field(ge=0)
    per_chunk_per_token_s: Real = 0.0
    chunk: Whole = Field(default=128, ge=1)


class CaseChunkedPrefill(_Part):
    """What parts of prompts add to a step, under paged rules."""

    per_step_s: Real = Field(ge=0)
    per_token_s: Real = Field(gt=0)


class CaseCost(_Part):
    """Costs. prefill: not under paged rules; chunked_prefill and eager_s (a step without a graph): only there."""

    f_s: dict[int, Real] = Field(min_length=1)
    alpha_s: Real = 0.0
    beta_s: Real = 0.0
    context_s_per_token: Real = 0.0
    prefill: CasePrefill | None = None
    chunked_prefill: CaseChunkedPrefill | None = None
    eager_s: Real | None = Field(default=None, ge=0, le=1)


class CasePerturbation(_Part):
    """Perturbation of the draws: means of late starts and re-arrivals, relative deviations of step times and costs.

    cost_sd: of f(b), each bucket on its own, and of prefill. Sizes that are not given have the values that every
    prediction assumes.
    """

    start_s: Real | None = Field(default=None, ge=0, le=LONGEST_S)
    lag_s: Real | None = Field(default=None, ge=0, le=LONGEST_S)
    step_sd: Real | None = Field(default=None, ge=0, lt=0.25)
    cost_sd: Real | None = Field(default=None, ge=0, lt=0.25)

    def perturbation(self, seed: int) -> Perturbation:
        changes: dict[str, Any] = {}
        if self.start_s is not None:
            changes["start_ms"] = self.start_s * 1000
        if self.lag_s is not None:
            changes["lag_ms"] = self.lag_s * 1000
        if self.step_sd is not None:
            changes["step_sd"] = self.step_sd
        if self.cost_sd is not None:
            of_costs = {"bucket_sd": self.cost_sd, "prefill_sd": self.cost_sd}
            changes |= {"decode_sd": 0.0, "artifact_sd": 0.0, **of_costs}
        return Perturbation(seed, **changes)


class SimulationCase(_Part):
    """One simulation: sessions on a configuration at given costs. Times in seconds.

    draws: number of perturbed simulations to add; ``seed`` identifies them. fields: what the result and each draw hold;
    default: everything. "requests.NAME" asks for one column of the requests.
    """

    id: str
    rules: RulesName = AUTO
    sessions: tuple[CaseSession, ...] = Field(min_length=1)
    config: CaseConfig
    cost: CaseCost
    emit: tuple[Literal["steps"], ...] = ()
    fields: tuple[Annotated[str, AfterValidator(_known_field)], ...] = ()
    draws: Whole = Field(default=0, ge=0, le=100_000)
    perturb: CasePerturbation = CasePerturbation()
    seed: Whole = Field(default=0, ge=0, le=LARGEST_SEED)

    @model_validator(mode="after")
    def _keys_fit_the_rules(self) -> SimulationCase:
        paged = {
            **{
                f"config.{key}": getattr(self.config, key)
                for key in sorted(keys_of("paged") & CaseConfig.model_fields.keys())
            },
            "cost.chunked_prefill": self.cost.chunked_prefill,
            "cost.eager_s": self.cost.eager_s,
        }
        slots = {"config.slots": self.config.kv_slots, "cost.prefill": self.cost.prefill}
        needed = ("cost.chunked_prefill",) if self.is_paged else tuple(slots)
        for key in needed:
            if {**paged, **slots}[key] is None:
                raise ValueError(f"{key}: Field required")
        for key, value in (slots if self.is_paged else paged).items():
            if value is not None:
                raise ValueError(f"{key}: the rules {rule_set(self.rules).name!r} do not have it")
        return self

    @property
    def is_paged(self) -> bool:
        return rule_set(self.rules).is_paged

    @property
    def request_columns(self) -> tuple[str, ...]:
        """Columns of the requests in the result; () where it holds no requests."""
        if not self.fields or "requests" in self.fields:
            return REQUEST_COLUMNS
        return tuple(column for column in REQUEST_COLUMNS if f"requests.{column}" in self.fields)


def simulate_file(path: Path) -> None:
    """Print the result of every line of a file, or of standard input ("-") as each line comes."""
    print_answers(path, simulate_jsonl if str(path) == "-" else simulate_batches)


def simulate_jsonl(lines: Iterable[str]) -> Iterator[str]:
    """One result line per case line, as soon as the line is read; blank lines are skipped. A bad line never raises."""
    return (_result_line(line) for line in lines if line.strip())


def simulate_batches(lines: Iterable[str]) -> Iterator[str]:
    """The same results in the same order, BATCH lines at a time on all cores."""
    cases = (line for line in lines if line.strip())
    while batch := list(islice(cases, BATCH)):
        yield from _in_order(parallel_map(lambda line, _progress: _result_line(line), batch))


def _in_order(results: Iterable[tuple[int, str]]) -> Iterator[str]:
    early: dict[int, str] = {}
    place = 0
    for done, result in results:
        early[done] = result
        while place in early:
            yield early.pop(place)
            place += 1


def _result_line(line: str) -> str:
    return json.dumps(_result_of(line))


def _result_of(line: str) -> dict[str, Any]:
    case_id: Any = None
    try:
        table = json.loads(line)
        case_id = table.get("id") if isinstance(table, dict) else None
        return run_case(SimulationCase.model_validate(table))
    except json.JSONDecodeError as error:
        return {"id": case_id, "error": f"not JSON: {error}"}
    except ValidationError as error:
        return {"id": case_id, "error": describe(error)}
    except (HarnessError, ValueError, RecursionError) as error:
        return {"id": case_id, "error": str(error)}


def describe(error: ValidationError) -> str:
    """Every problem with its key, except lists that are too short only because their parts are wrong."""
    items = error.errors()
    inner = [
        item
        for item in items
        if item["type"] != "too_short"
        or not any(
            len(other["loc"]) > len(item["loc"]) and other["loc"][: len(item["loc"])] == item["loc"] for other in items
        )
    ]
    lines = ((".".join(str(part) for part in item["loc"]), item["msg"].removeprefix("Value error, ")) for item in inner)
    return "; ".join(f"{key}: {message}" if key else message for key, message in lines)


def run_case(case: SimulationCase) -> dict[str, Any]:
    """Simulate one case; raises PlanError, SpecError or ValueError when it cannot be run."""
    config = EngineConfig.from_server(server_of(case))
    model = cost_model_of(case)
    check_durations(config, model)
    arrays = session_arrays([_sessions_of(case)], [0], [0])
    check_slots(arrays, config)
    outcome = run_batch(arrays, config, model, with_records=True)
    never = np.flatnonzero(outcome.requests["completed_ns"] == 0)
    if never.size:
        raise ValueError(
            f"sessions.{int(arrays.requests['session'][never[0]])}: never starts, its 'after' chain has no beginning"
        )
    result = {"id": case.id, "rules": config.rules, **_figures(case, config, arrays, outcome)}
    if case.draws:
        result["draws"] = list(_drawn_results(case, config, model, arrays))
    return result


def _drawn_results(
    case: SimulationCase, config: EngineConfig, model: CostModel, arrays: layout.PlanArrays
) -> Iterator[dict[str, Any]]:
    """The figures of every draw: all simulated in one call, unless steps are wanted, which only single calls record."""
    drawn = draw(arrays, config, model, case.perturb.perturbation(case.seed), range(case.draws))
    for truth in drawn.models:
        check_durations(config, truth)
    if "steps" not in case.emit:
        together = run_draws(drawn, config)
        for plan in range(case.draws):
            yield _figures(case, config, one_plan(drawn.arrays, plan), outcome_of_plan(drawn.arrays, together, plan))
        return
    for plan in range(case.draws):
        yield _figures(case, config, *run_draw(drawn, config, plan))


def run_draw(draws: Draws, config: EngineConfig, plan: int) -> tuple[layout.PlanArrays, layout.SimOutcome]:
    """One plan of the draws, with every step and eviction recorded."""
    alone = draws.alone(plan)
    return alone.arrays, run_draws(alone, config, with_records=True)


def outcome_of_plan(arrays: layout.PlanArrays, outcome: layout.SimOutcome, plan: int) -> layout.SimOutcome:
    """The results of one plan out of several."""
    record = record_as_dict(arrays.plans, plan)
    first, last = record["first_request"], record["first_request"] + record["num_requests"]
    return outcome._replace(
        requests=outcome.requests[first:last],
        histogram=outcome.histogram[plan : plan + 1],
        totals=outcome.totals[plan : plan + 1],
    )


def server_of(case: SimulationCase) -> ServerSpec:
    """The server of a case. A case may be larger than a server of an experiment, so it is not checked as one."""
    keys = case.config.model_dump(exclude_none=True)
    keys["decode_buckets"] = tuple(sorted(case.config.decode_buckets))
    if case.is_paged:
        keys.setdefault("block_size", PAGED_BLOCK_TOKENS)
    return ServerSpec.model_construct(**keys, rules=case.rules)


def check_durations(config: EngineConfig, model: CostModel) -> None:
    """Raise ValueError when a step that the configuration allows would take no time, or less."""
    for num_seqs in range(1, config.max_num_seqs + 1):
        bucket = config.bucket_of(num_seqs)
        # Costs are straight lines in the context: both ends decide.
        for context in (num_seqs, num_seqs * config.slot_tokens):
            if model.decode_step_ns(bucket, num_seqs, context) <= 0:
                raise ValueError(f"cost: a decode step of {num_seqs} requests and {context} tokens would take no time")
    if min(model.prefill_ns(1), model.prefill_ns(config.slot_tokens)) < 0:
        raise ValueError("cost.prefill: a prefill would take less than no time")


def cost_model_of(case: SimulationCase) -> CostModel:
    """The cost model of a case, its decimals taken as written."""
    cost, chunked = case.cost, case.cost.chunked_prefill
    prefill = cost.prefill or CasePrefill(per_chunk_s=0)
    model = CostModel(
        name=case.id,
        source="simulation case",
        f_fs={bucket: to_fs(value, FS_PER_S) for bucket, value in sorted(cost.f_s.items())},
        alpha_fs=to_fs(cost.alpha_s, FS_PER_S),
        beta_fs=to_fs(cost.beta_s, FS_PER_S),
        context_fs=to_fs(cost.context_s_per_token, FS_PER_S),
        chunk_tokens=prefill.chunk,
        call_fs=to_fs(prefill.per_chunk_s, FS_PER_S),
        token_fs=to_fs(prefill.per_chunk_per_token_s, FS_PER_S),
        chunk_step_fs=None if chunked is None else to_fs(chunked.per_step_s, FS_PER_S),
        chunk_token_fs=0 if chunked is None else to_fs(chunked.per_token_s, FS_PER_S),
        eager_ns=_ns(cost.eager_s or 0.0),
    )
    check_magnitudes(model)
    return model


def _sessions_of(case: SimulationCase) -> list[SessionPlan]:
    sessions: list[SessionPlan] = []
    for place, session in enumerate(case.sessions):
        if session.after is not None and (session.after >= len(case.sessions) or session.after == place):
            raise ValueError(f"sessions.{place}.after: there is no other session {session.after}")
        stream = 0
        requests: list[RequestPlan] = []
        for request in session.requests:
            requests.append(RequestPlan(stream, request.new_tokens, request.generate, _ns(request.wait_s)))
            stream += request.new_tokens + request.generate
        if requests[0].new_tokens < 1:
            raise ValueError(f"sessions.{place}.requests.0.new_tokens: a first prompt has at least 1 token")
        sessions.append(SessionPlan(place, _ns(session.start_s), session.after, None, tuple(requests)))
    return sessions


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def _figures(
    case: SimulationCase, config: EngineConfig, arrays: layout.PlanArrays, outcome: layout.SimOutcome
) -> dict[str, Any]:
    """The fields that a case asks for."""
    totals = record_as_dict(outcome.totals, 0)
    figures: dict[str, Callable[[], Any]] = {
        "requests": lambda: _requests(arrays, outcome, case.request_columns),
        "decode_steps": lambda: {
            f"{num_seqs}->{config.bucket_of(num_seqs)}": int(count)
            for num_seqs, count in enumerate(outcome.histogram[0])
            if count
        },
        "decode_s": lambda: totals["decode_ns"] / NS_PER_S,
        "prefill_s": lambda: totals["prefill_ns"] / NS_PER_S,
        "device_s": lambda: int(outcome.device_ns[0]) / NS_PER_S,
        "wait_session_s": lambda: totals["wait_ns"] / NS_PER_S,
        "evictions": lambda: totals["evictions"],
    }
    wanted = {*(case.fields or figures), *(("requests",) if case.request_columns else ())}
    result = {name: figure() for name, figure in figures.items() if name in wanted}
    if "steps" in case.emit:
        result["steps"] = _steps(outcome.steps[: totals["num_step_records"]])
    return result


def _requests(
    arrays: layout.PlanArrays, outcome: layout.SimOutcome, columns: Sequence[str]
) -> list[dict[str, int | float]]:
    """The requests in plan order, with these columns."""
    session, results = arrays.requests["session"], outcome.requests
    values: dict[str, list[int] | list[float]] = {
        "session": session.tolist(),
        "request": (np.arange(len(session)) - arrays.sessions["first_request"][session]).tolist(),
        "prompt_tokens": (arrays.requests["keep"] + arrays.requests["new"]).tolist(),
        "cached_tokens": results["cached_tokens"].tolist(),
        "arrival_s": _seconds(results["arrival_ns"]),
        "admitted_s": _seconds(results["admitted_ns"]),
        "first_token_s": _seconds(results["first_token_ns"]),
        "completed_s": _seconds(results["completed_ns"]),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*(values[name] for name in columns), strict=True)]


def _seconds(times_ns: IntArray) -> list[float]:
    # Python divides integers exactly, also above 2^53 ns.
    return [time_ns / NS_PER_S for time_ns in times_ns.tolist()]


def _steps(records: Records[layout.StepRecord]) -> list[list[Any]]:
    """Consecutive decode steps of the same n and b form one row, even where context makes their times differ."""
    steps: list[list[Any]] = []
    end_ns = -1
    for start_ns, kind, num_seqs, bucket, count, session, request, computed, duration_ns in records.tolist():
        if kind == STEP_DECODE:
            if steps and start_ns == end_ns and steps[-1][1:4] == ["decode", num_seqs, bucket]:
                steps[-1][4] += count
            else:
                steps.append([start_ns / NS_PER_S, "decode", num_seqs, bucket, count, None, None, None])
        elif session < 0:  # paged rules: parts of several prompts, perhaps beside decodes
            steps.append([start_ns / NS_PER_S, STEP_KINDS[kind].lower(), num_seqs, None, 1, None, None, computed])
        else:
            steps.append([start_ns / NS_PER_S, "prefill", 1, 1, 1, session, request, computed])
        end_ns = start_ns + count * duration_ns
    return steps
