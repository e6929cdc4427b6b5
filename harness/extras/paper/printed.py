"""The paper's predicted figures beside the same figures computed under any rules, and the page that compares them.

Printed values are compared with to their last digit, never used. Nothing is measured. The page's words about causes are
held by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.clock import NS_PER_S
from harness.extras.search.intervals import ABLATIONS, LABEL, with_arrivals_of
from harness.extras.search.result import TOP, SearchResult, sensitivity
from harness.extras.search.run import search
from harness.extras.search.space import load_space
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import load_cost_model
from harness.model.sim.kernel.arrays import PlanArrays
from harness.model.sim.plans import Input, input_arrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerShape, Treatment, WorkloadSpec, load_toml
from harness.processes import parallel_map
from harness.table import markdown_rows

PRINTED = load_toml(Path(__file__).with_name("printed.toml"))
SHAPES = {
    name: ServerShape(limit, tuple(buckets), *rest) for name, (limit, buckets, *rest) in PRINTED["shapes"].items()
}
BASELINE, MORE_SLOTS, SELECTED = SHAPES["baseline"], SHAPES["more_slots"], SHAPES["selected"]
WIDTH = 118
ABLATED_SEED = 20261000
RULES = ("paper", "paper+dummy", "vendor-0.11.1")


class Figure(NamedTuple):
    """One printed number. ``printed``: as the paper prints it, under ``rules``; "" where it prints none."""

    where: str
    what: str
    rules: str
    printed: str
    computed: str

    @property
    def agrees(self) -> bool:
        return self.printed in ("", self.computed)


class ConfigurationRow(NamedTuple):
    """One row of Table S12. measured_s: channel A of this configuration and of the baseline.

    ratio, ratio_dummy: without and with the dummy rule. error, error_dummy: their distance from the observed ratio.
    """

    measurement: str
    users: int
    seed: int
    candidate: ServerShape
    measured_s: tuple[float, float]
    ratio: str
    error: str
    ratio_dummy: str
    error_dummy: str
    reuse: int
    reuse_dummy: int


COMPARISONS = tuple(
    ConfigurationRow(*cells)._replace(candidate=SHAPES[cells[3]]) for cells in PRINTED["comparisons"]["rows"]
)


class Sums(NamedTuple):
    """Three blocks together."""

    device_ns: int
    decode_ns: int
    prefill_ns: int
    reused: int
    evictions: int


@lru_cache(maxsize=512)
def sums(candidate: ServerShape, users: int, seed: int, rules: str) -> Sums:
    """Device time and reused re-arrivals of a configuration over the blocks 0, 1, 2 of one seed."""
    config = EngineConfig.of_shape(candidate, rules)
    outcome = run_batch(_inputs(users, seed), config, load_cost_model("paper"))
    decode, prefill, evictions = (int(outcome.totals[name].sum()) for name in ("decode_ns", "prefill_ns", "evictions"))
    return Sums(decode + prefill, decode, prefill, int((outcome.requests["cached_tokens"] > 0).sum()), evictions)


def _inputs(users: int, seed: int, treatment: Treatment = "as-drawn") -> PlanArrays:
    workload = WorkloadSpec(source="paper", num_sessions=users)
    return input_arrays([Input(workload, seed, block) for block in range(3)], treatment)


def ratio(candidate: ServerShape, users: int, seed: int, rules: str) -> float:
    """Predicted cost ratio to the baseline, sums before division."""
    return sums(candidate, users, seed, rules).device_ns / sums(BASELINE, users, seed, rules).device_ns


def _figure(rules: str, where: str, what: str, computed: str, *printed: str) -> Figure:
    """printed: as the paper prints it under its base rules and, where it does, under its rules with the dummy slot."""
    in_order = ("paper", "paper+dummy")[: len(printed)]
    return Figure(where, what, rules, printed[in_order.index(rules)] if rules in in_order else "", computed)


def prediction_figures(rules: str) -> Iterator[Figure]:
    """The table of predictions, Table S12 and the parts named in section 4-5, computed under ``rules``."""
    for row in COMPARISONS:
        where, label, turns = f"Table S12, {row.measurement}, N={row.users}", row.candidate.label, 3 * row.users
        predicted = ratio(row.candidate, row.users, row.seed, rules)
        yield _figure(rules, where, f"ratio of {label}", f"{predicted:.4f}", row.ratio, row.ratio_dummy)
        if row.error:
            error = abs(row.measured_s[0] / row.measured_s[1] - predicted)
            yield _figure(rules, where, f"error e of {label}", f"{error:.4f}", row.error, row.error_dummy)
        reused = sums(row.candidate, row.users, row.seed, rules).reused
        printed, dummy = f"{row.reuse}/{turns}", f"{row.reuse_dummy}/{turns}"
        yield _figure(rules, where, f"reuse of {label}", f"{reused}/{turns}", printed, dummy)
    for what, name, printed in PRINTED["parts"]["rows"]:
        candidate = SHAPES[name]
        changed, base = (sums(each, 6, 20261100, rules) for each in (candidate, BASELINE))
        is_prefill = what.startswith("prefill")
        part = changed.prefill_ns / base.prefill_ns if is_prefill else changed.decode_ns / base.decode_ns
        where = "section 4-5, new inputs, N=6"
        yield _figure(rules, where, f"{what} of {candidate.label}", f"{part:.4f}", printed)


@lru_cache(maxsize=4)
def run_search(rules: str) -> SearchResult:
    """The paper's search under ``rules``, in a folder that is gone afterwards."""
    space = load_space("paper").model_copy(update={"rules": rules})
    with TemporaryDirectory() as folder:
        return search(space, Path(folder))


def search_figures(result: SearchResult) -> Iterator[Figure]:
    """The figures of section 5-1 and of Tables S10 and S11."""
    evaluation, best, top = result.evaluation, result.ranked[0], result.ranked[:TOP]
    assert evaluation is not None
    order = {candidate: index for index, candidate in enumerate(result.space.candidates())}
    grid_only = SHAPES["grid_only"]
    evaluated = {shape: f"{evaluation.sum_seconds[order[shape]]:.4f}" for shape in (SELECTED, MORE_SLOTS, grid_only)}
    figure = partial(_figure, result.space.rules)
    section, released = "section 5-1", "released with the paper"
    selected = result.candidate(best).label
    on_search, on_evaluation = (f"{scores.sum_seconds[best]:.6f}" for scores in (result.scores, evaluation))
    yield figure(section, "candidates", str(result.ledger.num_rows), "2077")
    yield figure(f"{section}, S9", "selected", selected, SELECTED.label, SELECTED.label)
    yield figure(section, "its ratio on the search inputs", on_search, "0.920931")
    yield figure(section, "its ratio on the evaluation inputs", on_evaluation, "0.906644")
    yield figure("S9", f"evaluation ratio of {SELECTED.label}", evaluated[SELECTED], "0.9066", "0.8798")
    yield figure(released, f"evaluation ratio of {MORE_SLOTS.label}", evaluated[MORE_SLOTS], "0.9279")
    yield figure(released, f"evaluation ratio of {grid_only.label}", evaluated[grid_only], "0.9929")
    limits = sorted({result.candidate(index).max_num_seqs for index in top})
    yield figure(section, "batch_size of the top 20", ", ".join(map(str, limits)), "16")
    spread = max(result.scores.sum_seconds[top]) - min(result.scores.sum_seconds[top])
    yield figure(section, "top 20 within 0.5 percentage points", "yes" if spread <= 0.005 else "no", "yes")
    names = ("search sum ratio", "search per-N mean", "evaluation sum ratio", "evaluation per-N mean")
    rows = sensitivity(result)
    for row, (score, users, chosen, *ratios, rank, top) in zip(rows, PRINTED["sensitivity"]["rows"], strict=True):
        where = f"Table S10, {row.score}, N={','.join(map(str, row.users))}"
        assert (row.score, row.users) == (score, tuple(users))
        yield figure(where, "selected", result.candidate(row.selected).label, SHAPES[chosen].label)
        scores = (row.search_sum, row.search_per_n, row.evaluation_sum, row.evaluation_per_n)
        for name, text, value in zip(names, ratios, scores, strict=True):
            yield figure(where, name, f"{value:.4f}", text)
        yield figure(where, "rank of the recorded one", str(row.reference_rank), str(rank))
        yield figure(where.replace("S10", "S11"), "top 20 in common", str(row.common_top), str(top))


def disagreements(figures: Sequence[Figure]) -> list[Figure]:
    return [figure for figure in figures if not figure.agrees]


def page(on_progress: Callable[[float], None] = lambda _share: None) -> str:
    """The whole page as Markdown. on_progress: takes the share of the searches done, which take most of the time."""
    predictions = {rules: list(prediction_figures(rules)) for rules in RULES}
    results: dict[int, tuple[list[Figure], set[int]]] = {}
    for place, result in parallel_map(_searched, RULES):
        results[place] = result
        on_progress(len(results) / len(RULES))
    searched = {rules: results[place][0] for place, rules in enumerate(RULES)}
    figures = [figure for rules in RULES for figure in (*predictions[rules], *searched[rules])]
    devices = ("baseline and changed configurations", "N", "device s", "evictions", "reused")
    ablations = ("change", "meaning", "baseline, device s", "more slots", "slots and grid")
    return rendered(
        "rules.md.j2",
        num_printed=sum(figure.printed != "" for figure in figures),
        wrong=disagreements(figures),
        same_top="the same 20" if results[0][1] == results[1][1] else "other",
        devices=markdown_rows(devices, _without_repeats(_device_rows())),
        predictions=_compared(predictions),
        searched=_compared(searched),
        label=LABEL,
        ablated=markdown_rows(ablations, _ablation_rows()),
    )


def rendered(template: str, **facts: object) -> str:
    """A page of this package as Markdown."""
    environment = Environment(
        loader=PackageLoader("harness.extras.paper", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["wrapped"] = _wrapped
    return environment.get_template(template).render(facts)


def _wrapped(text: str, bullet: str = "") -> str:
    """A paragraph in lines of at most WIDTH."""
    words = bullet + " ".join(text.split())
    indent = " " * len(bullet)
    return fill(words, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


def _searched(rules: str, _on_progress: object = None) -> tuple[list[Figure], set[int]]:
    """The figures of the paper's search under one set of rules, and its 20 best candidates."""
    result = run_search(rules)
    return list(search_figures(result)), set(result.ranked[:TOP])


def _device_rows() -> Iterator[tuple[object, ...]]:
    """A cell has a figure under each of RULES."""
    for candidate in (BASELINE, MORE_SLOTS, SELECTED):
        for users in (6, 8, 10):
            found = [sums(candidate, users, ABLATED_SEED, rules) for rules in RULES]
            device_s = [f"{each.device_ns / NS_PER_S:.3f}" for each in found]
            evictions = [each.evictions for each in found]
            reused = [f"{each.reused}/{3 * users}" for each in found]
            yield candidate.label, users, *(", ".join(map(str, each)) for each in (device_s, evictions, reused))


def _compared(figures: dict[str, list[Figure]]) -> str:
    """What each set of rules gives, figures of one place and configuration in a row; bold: unlike ``paper``."""
    rows: list[tuple[object, ...]] = []
    beside = zip(*(figures[rules] for rules in RULES), strict=True)
    for (where, subject), group in groupby(beside, lambda each: (each[0].where, _subject(each[0]))):
        cells = [
            (
                base.what.removesuffix(subject),
                *map(_beside_printed, (base, dummy)),
                vendor.computed if vendor.computed == base.computed else f"**{vendor.computed}**",
            )
            for base, dummy, vendor in group
        ]
        names, *of_rules = (", ".join(texts) for texts in zip(*cells, strict=True))
        rows.append((where, names + subject, *of_rules))
    return markdown_rows(("where", "figure", *RULES), _without_repeats(rows))


def _subject(figure: Figure) -> str:
    """ " of {1,2,4,8}/8", or "" of a figure that is of no configuration and has a row alone."""
    _, of, label = figure.what.partition(" of {")
    return of + label


def _beside_printed(figure: Figure) -> str:
    """Brackets: the paper prints none."""
    if not figure.printed:
        return f"({figure.computed})"
    return figure.computed if figure.agrees else f"{figure.computed} (printed {figure.printed})"


def _without_repeats(rows: Iterable[tuple[object, ...]]) -> Iterator[tuple[object, ...]]:
    """The same with a row's first cell empty where it repeats that of the row above."""
    for _, group in groupby(rows, lambda row: row[0]):
        first, *others = group
        yield from (first, *(("", *row[1:]) for row in others))


def _ablation_rows() -> Iterator[tuple[object, ...]]:
    """A cell has a figure at each N."""
    cost = load_cost_model("paper")
    for changed in ABLATIONS.values():
        by_users: list[tuple[str, ...]] = []
        for users in (6, 8, 10):
            arrays = _inputs(users, ABLATED_SEED, changed.treatment)
            rules = changed.rules or "vendor-0.11.1"
            if changed.is_fixed_arrivals:
                arrays = with_arrivals_of(arrays, EngineConfig.of_shape(BASELINE, rules), cost)
            configs = [EngineConfig.of_shape(candidate, rules) for candidate in (BASELINE, MORE_SLOTS, SELECTED)]
            baseline_s, *others_s = (
                run_batch(arrays, config, cost, evicts_by_last_use=changed.is_lru_slots).device_ns.sum() / NS_PER_S
                for config in configs
            )
            by_users.append((f"{baseline_s:.3f}", *(f"{each / baseline_s:.4f}" for each in others_s)))
        yield changed.name, changed.meaning, *map(", ".join, zip(*by_users, strict=True))
