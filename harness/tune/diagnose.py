"""What a server loses on a workload: reuse, the prefill that this costs, padding, steps without a graph, and who waits.

Of the valid sealed runs of one condition. What the records do not show is absent, never computed from defaults. After a
run it is a hint, with the command that searches what would save it. Nothing is simulated.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.analysis import extra_prefill_ns, run_figures
from harness.analysis.figures import RunFigures
from harness.analysis.logs.engine_steps import attended_by_step, covering_sizes, step_log_of
from harness.analysis.sessions import has_costs
from harness.analysis.stats import most_missed, t_quantile
from harness.analysis.summary import summarise
from harness.clock import NS_PER_S
from harness.errors import HarnessError, SpecError
from harness.kinds import kind_of_run
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import values_of
from harness.model.spec.server import PAGED_KEYS
from harness.stacks.rbln.rules.kv_rules import AUTO
from harness.table import interval_text

LEVEL = 0.95


@dataclass(frozen=True)
class Loss:
    """A part of the device time that a better configuration would not spend.

    share: of device time (A). low, high: 95 % interval over runs; None of one run. seconds: of the run's clock.
    """

    kind: str
    words: str
    seconds: float
    share: float
    low: float | None = None
    high: float | None = None

    @property
    def percent(self) -> str:
        """ "12.3 % (11.0 to 13.6)"."""
        share = f"{100 * self.share:.1f} %"
        if self.low is None or self.high is None:
            return share
        return f"{share} ({interval_text(100 * self.low, 100 * self.high, 1)})"


@dataclass(frozen=True)
class EagerSteps:
    """Decode steps of a vLLM that ran without a graph although graphs are on.

    count: how many of ``num_steps``. sizes: those to capture, which hold them as well as what is captured now.
    """

    count: int
    num_steps: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Losses of one condition, over its valid runs. Times in ns.

    shown: keys of [server] that were left to a vLLM, as it shows them: its KV memory follows from no other key.
    device_ns: modelled device time (A); None where steps, reuse or costs are not known. unknown: why there is no
    advice, "" where there can be. has_rules, has_costs: whether those of the server are known. waiting_session_ns: that
    sessions waited behind the prompts of others. overload: how many times more device time the sessions ask for than
    passes until the last one arrives; None: not more, or not known. eager: decode steps without a graph, where there
    were any. start_ms, lag_ms: mean lateness of the client in model ms, of exponential delays.
    """

    condition: str
    backend: str
    shown: Mapping[str, Any]
    num_runs: int
    num_rearrivals: int
    num_reused: int | None
    device_ns: int | None
    losses: tuple[Loss, ...]
    waiting_session_ns: int | None
    overload: float | None
    origin: str
    unknown: str
    has_rules: bool
    has_costs: bool
    eager: EagerSteps | None
    start_ms: float
    lag_ms: float

    @property
    def lost(self) -> list[tuple[str, str]]:
        """(kind, words) of what was lost, as far as the records show it."""
        rows = [(loss.kind, f"{loss.percent} of device time; {loss.words}") for loss in self.losses]
        if self.waiting_session_ns is not None:
            waited = f"{self.waiting_session_ns / NS_PER_S:.2f} session seconds"
            rows.append(("prefill blocking", f"{waited} behind the prompts of other sessions"))
        return rows

    def lines(self) -> Iterator[str]:
        """The diagnosis as lines of text."""
        if self.origin:
            yield self.origin
        if self.overload is not None:
            yield (
                f"overloaded: the sessions ask for {self.overload:.1f} times what this server can do until the last "
                "one arrives, so that queues grow; what follows is of a server that cannot keep up"
            )
        time = "" if self.device_ns is None else f", {self.device_ns / NS_PER_S:.2f} s of device time"
        runs = f"{self.num_runs} valid run{'s' * (self.num_runs != 1)}"
        yield f"{self.condition!r}: {runs}{time}"
        if self.num_reused is not None:
            yield f"  {self.num_reused} of {self.num_rearrivals} returning requests found their KV"
        for kind, words in self.lost:
            yield f"  {kind}: {words}"
        if self.unknown:
            yield f"  no advice: {self.unknown}"


def diagnose(runs: Sequence[SealedRun], condition: str = "") -> Diagnosis:
    """Diagnose one condition (default: the experiment's baseline); SpecError where it has no valid run."""
    name = condition or runs[0].spec.baseline_name
    valid = [run for run in runs if run.condition == name and run.is_valid]
    if not valid:
        raise SpecError(f"condition {name!r} has no valid run", where=runs[0].experiment, hint="Run it first")
    summary = summarise(valid)
    figures = summary.condition(name)
    by_run = [run_figures(run) for run in valid]
    unknown = next((why for is_missing, why in _unknowns(valid, by_run) if is_missing), "")
    device_ns = None if unknown else figures.a_ns
    losses = () if device_ns is None else tuple(_losses(valid, by_run))
    return Diagnosis(
        condition=name,
        backend=summary.backend,
        shown=_shown(valid[0]),
        num_runs=len(valid),
        num_rearrivals=figures.reuse.num_rearrivals,
        num_reused=figures.reuse.num_reused,
        device_ns=device_ns,
        losses=losses,
        waiting_session_ns=None if unknown else _blocked_ns(valid, figures.waiting_session_ns),
        overload=None if device_ns is None else summary.overloads.get(name),
        origin=summary.origin,
        unknown=unknown,
        has_rules=has_rules(valid[0]),
        has_costs=has_costs(valid[0]),
        eager=eager_steps(valid),
        # The mean of N evenly spread starts is half the spread. The median of an exponential is ln 2 times its mean.
        start_ms=(figures.start_spread_ms or 0.0) / 2 * summary.time_scale,
        lag_ms=(figures.rearrival_p50_ms or 0.0) / math.log(2) * summary.time_scale,
    )


def _shown(run: SealedRun) -> dict[str, Any]:
    """Keys of a vLLM's memory and steps as they are in force."""
    server = run.simulated_server
    return {key: getattr(server, key) for key in sorted(PAGED_KEYS)} if server.is_vllm and server.is_paged else {}


def _unknowns(valid: Sequence[SealedRun], figures: Sequence[RunFigures]) -> Iterator[tuple[bool, str]]:
    """(whether this is missing, why there is no advice then), the first cause first."""
    server = valid[0].server
    drafts = (
        "it decodes speculatively, and nothing says how many drafts are accepted: server.synthetic_acceptance_rates"
    )
    yield server.has_drafts or (any(run.drafts for run in figures) and not server.num_speculative_tokens), drafts
    yield not has_rules(valid[0]), "nothing shows the rules of this server; write them: server.rules"
    is_silent = any(run.reuse.num_rearrivals and run.reuse.num_reused is None for run in figures)
    yield is_silent, "the server does not state what it reused (--enable-prompt-tokens-details)"
    if step_log_of(valid[0]) is not None:
        steps = "its step log does not show the sizes of steps; start the server with --cudagraph-metrics"
    elif server.is_vllm and not server.step_log and not kind_of_run(valid[0].manifest.backend).is_restarted:
        steps = "[server] names no step_log; step_log = FILE, of its VLLM_CORE_STEPS_FILE, counts device time"
    else:
        steps = "no log shows the steps of this server; start it with its step log (docs/guides/vllm-steps.md)"
    yield not all(run.has_steps for run in figures), steps
    costs = "no costs of this server are known; fit them (harness server calibrate) and name them: server.cost_model"
    yield not has_costs(valid[0]), costs
    yield any(run.a_ns is None for run in figures), "the device time of these runs cannot be modelled"


def has_rules(run: SealedRun) -> bool:
    """Whether the scheduling rules of its server are known."""
    is_auto = str(run.manifest.requested_server.get("rules", AUTO)) == AUTO
    shows_rules = "rules" in (run.manifest.effective.get("shown") or ())
    return kind_of_run(run.manifest.backend).is_restarted or run.server.is_vllm or not is_auto or shows_rules


def _losses(valid: Sequence[SealedRun], figures: Sequence[RunFigures]) -> Iterator[Loss]:
    """The losses whose parts the records show, the largest first."""
    device_ns = [run.a_ns or 0 for run in figures]
    pairs = list(zip(valid, figures, strict=True))
    padding = [_padding_ns(*pair) for pair in pairs]
    losses = [
        _loss("lost reuse", _reuse_in_words(figures), [_lost_ns(*pair) for pair in pairs], device_ns),
        _loss("padding", _padding_in_words(padding), [each.total() for each in padding], device_ns),
    ]
    if any(eager := [_eager(run) for run in valid]):
        words, price_ns = f"{sum(eager):,} decode steps ran without one", valid[0].cost_model.eager_ns
        losses.append(_loss("steps without a graph", words, [count * price_ns for count in eager], device_ns))
    yield from sorted(losses, key=lambda loss: -loss.share)


def _loss(kind: str, words: str, lost_ns: Sequence[int], device_ns: Sequence[int]) -> Loss:
    """The share of the summed device time, with the t interval over runs of a ratio of sums."""
    total = sum(device_ns)
    share, num = sum(lost_ns) / total if total else 0.0, len(lost_ns)
    mean = total / num or 1.0
    left = [(lost - share * device) / mean for lost, device in zip(lost_ns, device_ns, strict=True)]
    if num < 2 or not total or not any(left):
        # Where every run lost the same share, mostly none, an interval of no width would say that it is known.
        return Loss(kind, words, sum(lost_ns) / NS_PER_S, share)
    half = t_quantile(LEVEL, num - 1) * math.sqrt(sum(each * each for each in left) / (num - 1) / num)
    return Loss(kind, words, sum(lost_ns) / NS_PER_S, share, max(0.0, share - half), share + half)


def _lost_ns(run: SealedRun, figures: RunFigures) -> int:
    """Prefill of tokens that could have been reused, by formula C."""
    return sum(
        extra_prefill_ns(run.cost_model, again.prompt_tokens - cached, again.reusable_tokens - cached)
        for again in figures.reuse.rearrivals
        for cached in (again.cached_tokens or 0,)
        if again.reusable_tokens > cached
    )


def _padding_ns(run: SealedRun, figures: RunFigures) -> Counter[int]:
    """Decode time of empty places by compiled size b, at f(b) - f(n)."""
    by_size, step_ns = Counter[int](), run.cost_model.decode_step_ns
    for (n, b), count in figures.steps_by_n_b.items():
        by_size[b] += count * (step_ns(b, n) - step_ns(n, n)) if b > n else 0
    return by_size


def _blocked_ns(valid: Sequence[SealedRun], of_slots: int | None) -> int | None:
    """What parts of prompts added to the steps of decoding requests; of KV slots ``of_slots``.

    None without a step log, or without costs of parts of prompts.
    """
    if not valid[0].server.is_paged:
        return of_slots
    total_ns = 0
    for run in valid:
        if (log := step_log_of(run)) is None or run.cost_model.chunk_step_fs is None:
            return None
        steps = values_of(log.steps, "context_tokens", "generation_requests")
        for (tokens, decodes), attended in zip(steps, attended_by_step(log), strict=True):
            if tokens and decodes:
                price_ns = run.cost_model.chunked_step_ns
                both, alone = price_ns(decodes, decodes, 0, tokens, attended), price_ns(decodes, decodes, 0, 0)
                total_ns += decodes * (both - alone)
    return total_ns


def _eager(run: SealedRun) -> int:
    """Decode steps without a graph."""
    log = step_log_of(run) if run.server.is_paged else None
    return 0 if log is None else sum(log.eager_by_n.values())


def eager_steps(valid: Sequence[SealedRun]) -> EagerSteps | None:
    """The decode steps without a graph of runs of one server; None where there are none, or no step log.

    Source: vLLM 0.33.0, config/compilation.py, adjust_cudagraph_sizes_for_spec_decode(); v1/cudagraph_dispatcher.py.
    """
    logs = [
        log for run in valid if run.server.is_paged and (log := step_log_of(run)) is not None and not log.num_drafts
    ]
    counts = sum((Counter(log.eager_by_n) for log in logs), Counter[int]())
    if not counts:
        return None
    num_steps = sum(log.decode_steps.num_rows for log in logs)
    sizes = tuple(covering_sizes(dict(sorted(counts.items())), valid[0].manifest.decode_buckets))
    return EagerSteps(counts.total(), num_steps, sizes)


def _reuse_in_words(figures: Sequence[RunFigures]) -> str:
    again = [each for run in figures for each in run.reuse.rearrivals]
    lost = sum((each.cached_tokens or 0) < each.reusable_tokens for each in again)
    tokens = sum(max(0, each.reusable_tokens - (each.cached_tokens or 0)) for each in again)
    evicted = sum((run.evictions or Counter[str]()).total() for run in figures)
    by = f"; {evicted} evictions" if evicted else ""
    if again and not lost:
        by += f"; a true share of up to {100 * most_missed(len(again)):.1f} % of them shows none of {len(again)} too"
    return f"{lost} of {len(again)} returning requests computed {tokens:,} tokens again{by}"


def _padding_in_words(padding: Sequence[Counter[int]]) -> str:
    """The sizes that lose most, each with the steps that it ran for fewer requests."""
    by_size = Counter[int]()
    for of_run in padding:
        by_size.update(of_run)
    total = by_size.total()
    if total <= 0:
        return "every step ran at its own size"
    shares = [f"size {size}: {100 * lost / total:.0f} %" for size, lost in by_size.most_common(3) if lost > 0]
    return f"of it {', '.join(shares)}"


@dataclass(frozen=True, slots=True)
class Hint:
    """What sealed runs suggest. command: what searches a configuration that loses less."""

    diagnosis: Diagnosis
    command: str

    @property
    def losses(self) -> list[tuple[str, str]]:
        """(kind, words) of what the baseline lost, as far as its records show it."""
        found = self.diagnosis
        if (eager := found.eager) is not None:
            share = f"{eager.count:,}, {100 * eager.count / eager.num_steps:.1f} % of the decode steps"
            captured = f"; server.decode_buckets = {list(eager.sizes)} captures them" if eager.sizes else ""
            return [("Steps without a graph", share + captured)]
        return [(kind.capitalize(), words) for kind, words in found.lost]

    @property
    def line(self) -> str:
        """One line with the command, or why there is no advice."""
        if self.diagnosis.unknown and self.diagnosis.eager is None:
            return f"no advice: {self.diagnosis.unknown}"
        over = f"overloaded by a factor of {self.diagnosis.overload:.1f}; " if self.diagnosis.overload else ""
        lost = ", ".join(f"{loss.kind} {loss.percent}" for loss in self.diagnosis.losses)
        if self.diagnosis.eager is not None:
            ((kind, words),) = self.losses
            lost = f"{kind.lower()}: {words}"
        return f"next: {over}{self.diagnosis.condition} loses {lost or 'nothing that is known'}: {self.command}"


def hint(sealed: Sequence[SealedRun], source: str | Path = "") -> Hint | None:
    """What the sealed runs of an experiment suggest; None where their baseline has no valid run.

    source: the file of the experiment; default: its name.
    """
    try:
        source = source or sealed[0].spec.name
        if str(source).endswith(".json"):
            # A freeze is no file of an experiment; the folder of its runs is read as one.
            source = sealed[0].path.parents[1]
        return Hint(diagnose(sealed), shlex.join(["harness", "tune", str(source)]))
    except HarnessError:
        # Sealed by another version, or no valid run.
        return None
