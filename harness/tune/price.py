"""What steps cost on today's server: costs that are named, a quick calibration, or none, so that time in flight counts.

Nothing is run here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from harness.analysis.calibration.cost_file import fit_runs, write_cost_file
from harness.analysis.calibration.fit import MAX_SHARE
from harness.analysis.sessions import DEFAULT_COSTS
from harness.clock import NS_PER_MS
from harness.kinds import kind_named, kind_of_run
from harness.measure.records.run import SealedRun
from harness.model.engine.cost import CostModel, find_cost_file, load_cost_model
from harness.model.spec import ExperimentSpec, ServerSpec, load_toml
from harness.model.spec.sections import Basis
from harness.runner.calibrate import LOOSE_LIMITS, QUICK_SWEEPS, READ_LATE, CalibrationSpec, calibration_experiment
from harness.tune.confirm import base_condition, plain_table
from harness.tune.diagnose import Diagnosis

COSTS = "costs"
"""Folder of a tune with the cost file of its calibration."""
ASSUMED, ASSUMED_PAGED = "paper", "emulated-gpu"
SEED = 20261117
PROMPT_KEYS = ("prompt_form", "token_id_range")
SWEPT_LENGTHS = ("context_tokens", "prefill_tokens")
ASSUMED_EAGER_MS = 3
"""What a step without a graph takes more where nobody measured it: some 400 kernels at 8 us from Python, arithmetic."""
SIZE_LEVERS = frozenset({"max_num_seqs", "decode_buckets"})
"""Keys that change how many requests share a step."""
LARGEST_FIT_ERROR = 0.5
"""A calibration that errs by a larger share, measured and not fitted, decides nothing."""


class Price(NamedTuple):
    """The costs that a search takes. is_assumed: nobody measured them for this server, or their fit errs too much, so
    that they alone decide nothing. channel: what a measurement counts, "a" modelled device time, "b" time in flight."""

    cost_model: str
    is_assumed: bool
    channel: Basis
    words: str


def needs_calibration(spec: ExperimentSpec) -> bool:
    """Whether no costs are named and the backend can start servers of which none is known."""
    kind = kind_named(spec.backend)
    return kind.is_restarted and kind.has_device is True and not names_costs(spec)


def names_costs(spec: ExperimentSpec) -> bool:
    """Whether the file names the costs of the server that runs today."""
    return "cost_model" in spec.server.model_fields_set or "cost_model" in base_condition(spec).server


def expected_price(spec: ExperimentSpec, server: ServerSpec) -> str:
    """Where the costs will come from, in words, before any run. server: today's."""
    if needs_calibration(spec):
        return "no costs are named, so a quick calibration of today's server, before all else"
    kind = kind_named(spec.backend)
    # Of a server that somebody else started, the usual costs are a guess.
    is_named = names_costs(spec) and (kind.is_restarted or server.cost_model != DEFAULT_COSTS)
    if is_named or kind.has_device is False:
        return f"the costs of {server.cost_model!r}"
    return "no costs are named: those that the server shows, else time in flight alone"


def unasked_costs(spec: ExperimentSpec, server: ServerSpec) -> str:
    """Why the costs of a search before any run decide nothing, in words; "" where they may. server: today's."""
    if names_costs(spec) or kind_named(spec.backend).has_device is False:
        return _errs_too_much(server.cost_model)
    return f"no costs are named; the search takes those of {assumed_costs(server)!r}"


def assumed_costs(server: ServerSpec) -> str:
    """The cost file of a server of which nothing is known."""
    return ASSUMED_PAGED if server.is_paged else ASSUMED


def calibration_of(spec: ExperimentSpec, server: ServerSpec) -> ExperimentSpec:
    """The quick sweeps of today's server, as an experiment: with its client, limits and prompts, lengths that it takes.

    Limits of lateness are no tighter than those of a calibration.
    """
    if server.is_paged:
        server = server.model_copy(update={"cost_model": ASSUMED_PAGED})
    table = plain_table(spec)
    prompts = {key: value for key, value in table.get("workload", {}).items() if key in PROMPT_KEYS}
    loose = {**LOOSE_LIMITS, **(READ_LATE if server.is_vllm else {})}
    limits = {key: max(value, loose.get(key, value)) for key, value in table.get("limits", {}).items()}
    quick: dict[str, Any] = dict(QUICK_SWEEPS)
    for key in SWEPT_LENGTHS:
        quick[key] = _within(quick[key], server.slot_tokens)
    sweeps = CalibrationSpec(
        name=f"{spec.name[:52]}-calibrate",
        backend=spec.backend,
        server=server.replica,
        base_seed=SEED,
        time_scale=spec.time_scale,
        sections={"workload": prompts, "limits": limits, "client": table.get("client", {})},
        **quick,
    )
    return calibration_experiment(sweeps)


def _within(lengths: Sequence[int], longest: int) -> tuple[int, ...]:
    """The lengths, cut to what leaves room for an answer in the longest request."""
    room = max(longest // 2, longest - 2 * QUICK_SWEEPS["generate_tokens"])
    return tuple(dict.fromkeys(min(length, room) for length in lengths))


def fitted(folder: Path, runs: Sequence[SealedRun]) -> Path:
    """The cost file of these sweeps, written once; SpecError where they determine no costs."""
    place = folder / COSTS
    if known := sorted(place.glob("*.toml")):
        return known[0]
    return write_cost_file(fit_runs(runs, seed=SEED), place, "calibrated")


def fit_errors(cost_model: str | Path) -> dict[str, float]:
    """The largest share by which the fit of a cost file errs, measured and not fitted, by the part of a step."""
    fits: dict[str, Any] = load_toml(find_cost_file(cost_model)).get("calibration", {})
    parts = {"decode steps": "decode", "parts of prompts": "prefill"}
    shares = {words: fits.get(part, {}).get("held_out_max_share") for words, part in parts.items()}
    return {words: share for words, share in shares.items() if share is not None}


def fit_in_words(errors: Mapping[str, float]) -> str:
    """How far a fit errs at most; "" where that is not known."""
    known = [f"{100 * share:.1f} % of {words}" for words, share in errors.items()]
    return f"the fit errs by at most {' and '.join(known)}, measured and not fitted" if known else ""


def misfit_of(cost_model: str | Path) -> str:
    """What an answer by these costs has to say of their fit; "" where it is good, or not known."""
    errors = fit_errors(cost_model)
    return f"Costs: {fit_in_words(errors)}." if max(errors.values(), default=0) > MAX_SHARE else ""


def _errs_too_much(cost_model: str) -> str:
    """That these costs decide nothing, as their fit errs too much; "" where it does not."""
    errors = fit_errors(cost_model)
    if max(errors.values(), default=0) <= LARGEST_FIT_ERROR:
        return ""
    return f"the costs of {cost_model!r} decide nothing, and time in flight alone is measured: {fit_in_words(errors)}"


def has_graphs(server: ServerSpec) -> bool:
    """Whether a vLLM is known to capture graphs, so that a step without one costs more."""
    return server.is_vllm and server.is_paged and bool(server.decode_buckets)


def with_eager_steps(model: CostModel, server: ServerSpec) -> CostModel:
    """The costs with the assumed price of a step without a graph, where they have none."""
    if not has_graphs(server) or model.eager_ns or model.chunk_eager_ns:
        return model
    return replace(model, eager_ns=ASSUMED_EAGER_MS * NS_PER_MS, chunk_eager_ns=ASSUMED_EAGER_MS * NS_PER_MS)


def price_of(server: ServerSpec, diagnosis: Diagnosis, levers: Sequence[str] = ()) -> Price:
    """The costs of today's server, by what its runs showed. levers: keys that the search may change."""
    # The modelled GPU's costs are arithmetic, whoever names them for a device.
    is_borrowed = server.cost_model == ASSUMED_PAGED and kind_of_run(diagnosis.backend).has_device is not False
    if not diagnosis.has_costs or is_borrowed:
        costs = assumed_costs(server)
        words = (
            f"no costs of this server are known; the search assumes those of {costs!r}, which nobody measured on it, "
            "and the measurement counts time in flight alone"
        )
        if has_graphs(server):
            words += f"; a step without a graph is assumed to take {ASSUMED_EAGER_MS} ms more"
        return Price(costs, True, "b", words)
    if words := _errs_too_much(server.cost_model):
        return Price(server.cost_model, True, "b", words)
    words = f"the costs of {server.cost_model!r}"
    sizes = load_cost_model(server.cost_model).measured_sizes
    if len(sizes) == 1 and SIZE_LEVERS & set(levers):
        words += f" decide nothing, and time in flight alone is measured: of all sizes only {sizes[0]} was measured"
        return Price(server.cost_model, True, "b", words)
    if diagnosis.unknown:
        words += f"; time in flight alone is measured: {diagnosis.unknown}"
    return Price(server.cost_model, False, "b" if diagnosis.unknown else "a", words)
