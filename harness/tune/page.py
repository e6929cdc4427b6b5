"""The page of a tune: the answer, losses before and after, the configurations that were searched, and what to copy.

One file without a script; every number of a picture stands in a table below. Nothing is computed from runs here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from harness.html import code, figure, listing, page, rows_table, section, text
from harness.model.spec import ExperimentSpec, TuneSpec
from harness.present.report.svg import INK, MUTED, PAGE_WIDTH_IN, Sheet, condition_color
from harness.table import interval_text, with_error
from harness.tune.answer import Answer, changes, modelled, to_copy
from harness.tune.confirm import BASE, BEST, SMALLEST, Confirmed, base_of, candidates_of, is_repeated
from harness.tune.diagnose import Diagnosis
from harness.tune.explore import Explored
from harness.tune.predict import Option
from harness.tune.setups import Baseline, Setup
from harness.tune.targets import Share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NARROW_IN = 3.75
COLOURS = (0, 2)
"""Of the candidates: the others are those of losses."""
CLASSES = {"lost reuse": "reuse", "padding": "pad", "steps without a graph": "eager"}


class TuneResult(NamedTuple):
    """What a tune found; None for a stage that it has not reached.

    before, after: losses of today's server and of the chosen one on the same plans, measured.
    """

    spec: ExperimentSpec
    answer: Answer
    diagnosis: Diagnosis | None = None
    explored: Explored | None = None
    before: Diagnosis | None = None
    after: Diagnosis | None = None

    @property
    def base(self) -> Baseline:
        """What runs today."""
        return base_of(self.spec, self.explored)

    @property
    def candidates(self) -> dict[str, Option]:
        """What is measured beside it, by name."""
        return {} if self.explored is None else candidates_of(self.explored)

    @property
    def made(self) -> str:
        """What the plans of the confirmation ran on, where no device did: "simulated", "emulated"."""
        return modelled(self.spec, "" if self.diagnosis is None else self.diagnosis.backend)

    @property
    def seen(self) -> str:
        """What came of the plans that confirmed: "measured"; where no server ran, "simulated on new plans"."""
        if self.made != "simulated":
            return "measured"
        return "simulated again" if is_repeated(self.spec) else "simulated on new plans"

    @property
    def assumed(self) -> str:
        """The costs that the search took and nobody measured on this server; "" where they are its own."""
        is_assumed = self.diagnosis is not None and self.diagnosis.has_rules and not self.diagnosis.has_costs
        return repr(self.spec.server.cost_model) if is_assumed else ""


def tune_page(found: TuneResult) -> str:
    """The page as HTML."""
    spec, explored, base = found.spec, found.explored, found.base
    first, *parts = _head(found)
    if bars := _bars(found):
        parts.append(section("Where device time goes", bars))
    if found.answer.capacities:
        parts.append(section("Agents at a time", _agents(found)))
    elif explored is not None and explored.screened:
        parts.append(section("What was searched", _frontier(found, explored) + _cost_and_ttft(found, explored)))
    copied = "\n".join([*to_copy(spec, found.answer, base), "", _server_table(base, found.answer)]).strip()
    parts += [
        section("What to copy", code(copied)),
        section("What would overturn it", listing(_overturns(found))),
        section("How it was found", listing(_how(found), "ol")),
    ]
    if explored is not None:
        parts.append(section("Numbers", _numbers(found, explored)))
    return page(f"{spec.title or spec.name}: tuned", parts, first)


def _head(found: TuneResult) -> tuple[str, str]:
    """(the answer, which stands above the title; its state and what it rests on)."""
    state = found.answer.state
    where = f" ({found.made})" if found.made else ""
    mark = "" if state == "confirmed" else ' class="open"'
    parts = [f'<p class="tune-state"><b{mark}>{escape(state)}{where}</b></p>']
    if found.diagnosis is not None:
        over = found.diagnosis.overload
        asked = f"Overloaded: the sessions ask for {over or 0:.1f} times what this server can do."
        parts += [text(found.diagnosis.origin, "banner"), text("" if over is None else asked, "banner alert")]
    parts += [text(unbroken(line), "dim") for line in (found.answer.rests, found.answer.why)]
    return text(unbroken(found.answer.sentence), "tune-answer"), "".join(parts)


def unbroken(sentence: str) -> str:
    """No line ends between a number and its percent sign."""
    return sentence.replace(" %", "\u00a0%")


def _bars(found: TuneResult) -> str:
    """Today's losses, and those of the chosen configuration, in shares of today's device time."""
    before = found.before or found.diagnosis
    if before is None or before.device_ns is None:
        return ""
    after, option = found.after, found.answer.option
    rows = [_bar(f"today, {found.base.setup.label}", before, 1.0)]
    note = "Shares of today's device time."
    if after is not None and after.device_ns is not None and option is not None:
        mean = after.device_ns / after.num_runs / (before.device_ns / before.num_runs)
        rows.append(_bar(option.setup.label, after, _share_in_answer(found, option) or mean))
        note += " Both on the same plans."
    kinds = [loss.kind for loss in before.losses]
    legend = _legend([("work", "work"), *((CLASSES[kind], kind) for kind in kinds)])
    return f'<div class="bars">{"".join(rows)}</div>{legend}{text(note, "caption")}'


def _legend(keys: Iterable[tuple[str, str]]) -> str:
    """The meaning of each colour. keys: its class in the style sheet, and the words."""
    spans = "".join(f'<span><i class="key {kind}"></i>{escape(words)}</span>' for kind, words in keys)
    return f'<p class="legend">{spans}</p>'


def _share_in_answer(found: TuneResult, option: Option) -> float | None:
    """The chosen configuration's device time of today's, as the answer has it: the bar has the same."""
    shown = (each for each in found.answer.measured if found.candidates.get(each.name) == option)
    return next((1 - each.saving for each in shown), None)


def _bar(name: str, found: Diagnosis, share: float) -> str:
    """One bar; its losses are the shares of its own device time, which is ``share`` of today's."""
    losses = {loss.kind: loss.share * share for loss in found.losses}
    work = max(0.0, share - sum(losses.values()))
    parts = [("work", work), *((CLASSES[kind], lost) for kind, lost in losses.items())]
    spans = "".join(f'<span class="{kind}" style="width:{100 * max(part, 0):.2f}%"></span>' for kind, part in parts)
    words = ", ".join(f"{kind} {100 * lost:.1f} %" for kind, lost in losses.items())
    label = f"{name}: {100 * share:.1f} % of today's device time; {words}"
    return (
        f'<div class="bar-row"><span>{escape(name)}</span>'
        f'<div class="bar" role="img" aria-label="{escape(label)}">{spans}</div>'
        f'<span class="fig">{100 * share:.1f} %</span></div>'
    )


def _agents(found: TuneResult) -> str:
    """What was predicted and seen of each number of agents at a time."""
    wanted, capacities = (found.spec.tune or TuneSpec()).percentile, found.answer.capacities
    rows = [
        (
            *(f"{each.name}, {each.setup.label}", point.verdict, str(point.agents)),
            *(_share(point.requests), _share(point.sessions), str(point.num_runs)),
        )
        for each in capacities
        for point in sorted(each.points, key=lambda point: point.agents)
    ]
    heads = ("configuration", f"{wanted:g} % within the targets", "agents", "requests, %", "sessions, %", "plans")
    most = "; ".join(f"{each.name}: {each.predicted} predicted, {each.words} {found.seen}" for each in capacities)
    caption = f"Most agents at a time: {most}. Intervals: 95 % at each number."
    return rows_table("Agents at a time", heads, rows, 2) + text(caption, "caption")


def _share(share: Share | None) -> str:
    """ "97.1 (94.0 to 98.6)"."""
    return "" if share is None else f"{100 * share.share:.1f} ({interval_text(100 * share.low, 100 * share.high, 1)})"


def _frontier(found: TuneResult, explored: Explored) -> str:
    """Every configuration as a dot: cost against memory and number of sizes, or against requests at once."""
    base = found.base
    shown = [base.setup, *(setup for setup, _ in explored.screened)]
    varied = [by if len({_place(setup, by) for setup in shown}) > 1 else "limit" for by in ("memory", "sizes")]
    kinds = list(dict.fromkeys(varied))
    names = " and ".join(_axis(base, by) for by in kinds)
    label = f"Predicted device time of every configuration against {names}"
    with Sheet() as sheet:
        svgs: list[str] = []
        for width, height, rows in ((PAGE_WIDTH_IN, 3.5, 1), (NARROW_IN, 3.2 * len(kinds), len(kinds))):
            drawing = sheet.figure(width, height)
            drawn = drawing.subplots(rows, len(kinds) // rows, sharey=rows == 1, squeeze=False).flat
            for place, (axes, by) in enumerate(zip(drawn, kinds, strict=True)):
                _draw(axes, found, explored, by)
                if rows > 1 or not place:
                    axes.set_ylabel("device time, of today's")
            svgs.append(sheet.render(drawing, name="wide" if rows == 1 else "narrow", label=label))
    caption = (
        "Grey: predicted by the first pass. Filled: predicted on plans that chose nothing. "
        f"Open, with its 95 % interval: {found.seen}. The square and the line are what runs today."
    )
    keys = [(f"k{place}", f"{name}: {option.setup.label}") for place, (name, option) in enumerate(_named(found))]
    pictures = f'<div class="scroll wide-only">{svgs[0]}</div><div class="narrow-only">{svgs[1]}</div>'
    return _legend(keys) + figure(pictures, caption)


def _cost_and_ttft(found: TuneResult, explored: Explored) -> str:
    """Device time against p99 of TTFT, with the configurations that none beats in both; "" where it is not known."""
    if explored.today is None or not explored.felt:
        return ""
    least = math.inf
    front: list[tuple[float, float]] = []
    for ratio, p99_ms in sorted(explored.felt):
        if p99_ms < least:
            front.append((ratio, p99_ms))
            least = p99_ms
    label = "Predicted device time against the p99 of TTFT, with the front of both"
    with Sheet() as sheet:
        drawing = sheet.figure(PAGE_WIDTH_IN, 3.2)
        axes = drawing.subplots()
        # Points that no eye tells apart are one.
        shown = {(float(f"{p99_ms:.3g}"), round(ratio, 3)) for ratio, p99_ms in explored.felt if ratio < 1.5}
        axes.plot(*zip(*shown, strict=True), ".", color=MUTED, alpha=0.35, ms=4)
        axes.step([p99_ms for _, p99_ms in front], [ratio for ratio, _ in front], color=INK, lw=0.9, where="pre")
        axes.plot(explored.today.ttft_p99, 1.0, "s", color=INK, ms=5)
        for number, (_, option) in enumerate(_named(found)):
            if option.felt is not None:
                color = condition_color(COLOURS[number])
                axes.plot(option.felt.ttft_p99, option.ratio.ratio, "o", color=color, ms=7)
        axes.set_xlabel("p99 of TTFT, ms")
        axes.set_ylabel("device time, of today's")
        svg = sheet.render(drawing, name="cost-ttft", label=label)
    caption = (
        "Grey: predicted by the first pass. The line: no configuration has less of one without more of the other. "
        "Filled: predicted on plans that chose nothing. The square is what runs today."
    )
    return figure(f'<div class="scroll">{svg}</div>', caption)


def _named(found: TuneResult) -> list[tuple[str, Option]]:
    """What is measured, the best first; in the order of its colours."""
    return list(found.candidates.items())[::-1]


def _place(setup: Setup, by: str) -> float:
    """Where a configuration lies on an axis: "memory", "sizes" or "limit", requests at once."""
    memory = setup.kv_slots if setup.kv_slots is not None else setup.num_gpu_blocks
    return float({"memory": memory or 0, "sizes": len(setup.decode_buckets), "limit": setup.max_num_seqs}[by])


def _draw(axes: Axes, found: TuneResult, explored: Explored, by: str) -> None:
    from matplotlib.ticker import MaxNLocator

    def place(setup: Setup) -> float:
        return _place(setup, by)

    # A wall of bad configurations would hide those that compete.
    least = min(score for _, score in explored.screened)
    shown = [(place(setup), score) for setup, score in explored.screened if score < 1.15 + (1 - least)]
    axes.plot(*zip(*shown, strict=True), ".", color=MUTED, alpha=0.35, ms=4)
    axes.axhline(1.0, color=INK, lw=0.7)
    axes.plot(place(found.base.setup), 1.0, "s", color=INK, ms=5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    for number, (name, option) in enumerate(_named(found)):
        color = condition_color(COLOURS[number])
        axes.plot(place(option.setup), option.ratio.ratio, "o", color=color, ms=7)
        # Beside each other where both have the same memory.
        shift = (1 + number) * (0.02 * max(place(option.setup), 1.0) if by == "memory" else 0.1)
        for each in found.answer.measured:
            if each.name == name:
                _measured(axes, place(option.setup) + shift, each, color)
    axes.set_xlabel(_axis(found.base, by))


def _measured(axes: Axes, x: float, each: Confirmed, color: str) -> None:
    ratio = 1 - each.saving
    if each.low is not None and each.high is not None:
        axes.plot([x, x], [1 - each.high, 1 - each.low], color=color, lw=1.2)
    axes.plot(x, ratio, "o", color=color, ms=7, mfc="none")


def _axis(base: Baseline, by: str) -> str:
    if by != "memory":
        return "compiled sizes" if by == "sizes" else "requests at once"
    return "KV slots" if base.setup.kv_slots is not None else "KV blocks"


def _server_table(base: Baseline, answer: Answer) -> str:
    keys = changes(answer, base)
    router = keys.pop("router", {})
    keys |= {f"router.{key}": value for key, value in router.items()}
    return "\n".join(["[server]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]) if keys else ""


def _overturns(found: TuneResult) -> Iterator[str]:
    """What the answer does not hold for, or rests on."""
    option = found.answer.option
    if option is not None and option.turns is not None:
        yield f"Costs: {option.turns}."
    if option is not None and option.unmeasured:
        yield f"Costs that nobody measured: {option.unmeasured}."
    if costs := found.assumed:
        yield f"Costs: the search took those of {costs}, which nobody measured on this server."
    if found.answer.misfit:
        yield found.answer.misfit
    for each in found.answer.measured:
        if each.low is not None and each.high is not None:
            saved = interval_text(100 * each.low, 100 * each.high, 1)
            beside = "".join(f"; {part}" for part in (each.left_open, each.beside) if part)
            yield f"Chance: {each.name} saves {saved} % (95 %, at every look){beside}."
    workload, rates = found.spec.workload, found.spec.server.synthetic_acceptance_rates
    if rates:
        drawn = ", ".join(map(str, rates))
        yield f"Other acceptance: drafts were accepted at the given rates, {drawn}, not by a drafter on your text."
    plans = f"the plans are new draws of this workload ({workload.source}), not of another one"
    yield f"Other sessions: {'every plan sends the same ones' if is_repeated(found.spec) else plans}."
    if found.diagnosis is not None and found.made:
        yield "Another server: what is simulated or emulated decides nothing of a device."


def _how(found: TuneResult) -> Iterator[str]:
    """In at most five lines."""
    diagnosis, explored, answer = found.diagnosis, found.explored, found.answer
    if diagnosis is not None:
        losses = "; ".join(f"{loss.kind} {loss.percent}" for loss in diagnosis.losses) or diagnosis.unknown
        yield f"Diagnosed on {diagnosis.num_runs} runs of what runs today: {losses}."
    if explored is None:
        return
    if explored.ceiling is not None:
        ceiling = 100 * (1 - explored.ceiling.ratio)
        by = f" by the costs of {found.assumed}, which nobody measured on this server" if found.assumed else ""
        bound = "every size, memory without end" if explored.baseline.decode_buckets else "memory without end"
        yield f"No configuration is predicted to save more than {ceiling:.1f} %{by} ({bound})."
    alike = f"; {explored.alike_in_words} on every plan, so it was not measured" * bool(explored.alike)
    yield (
        f"Explored {explored.num_setups:,} configurations in {explored.num_simulated:,} simulations: "
        f"{'; '.join(explored.bounds)}{alike}."
    )
    if answer.measured:
        yield "Fixed the predictions, the rule and the plans before the first run of a candidate (frozen.json)."
        yield (
            f"{found.seen.capitalize()}: "
            + "; ".join(f"{each.name} {each.words} on {each.num_blocks} plans" for each in answer.measured)
            + "."
        )


def _numbers(found: TuneResult, explored: Explored) -> str:
    """A row for each configuration that was predicted on the last plans; the names are those of the goal."""
    answer, base = found.answer, found.base
    by_name = {each.name: each for each in answer.measured}
    of_cost = [
        (option.setup, name) for option, name in ((explored.smallest, SMALLEST), (explored.best, BEST)) if option
    ]
    by_setup: dict[Setup, list[str]] = {}
    for setup, name in [(each.setup, each.name) for each in answer.capacities] or of_cost:
        by_setup.setdefault(setup, []).append(name)
    rows = [_row(option, by_setup.get(option.setup, []), by_name) for option in explored.options]
    device = _of_device(base.memory_gib(base.setup), base.compile_s(base.setup))
    today = (base.setup.label, BASE, "1", "", "", *device)
    heads = ("configuration", "named", "predicted ratio", f"{found.seen}, ratio (95 %)", "reuse")
    heads = (*heads, *("GiB a device", "s to compile")[: len(device)])
    table = rows_table("Numbers", heads, [today, *rows], 2)
    best = explored.best
    if best is None or all(best.ratio.ratio <= option.ratio.ratio for option in explored.options):
        return table
    why = (
        f"{BEST} was chosen on other plans, those of the search. On these, which chose nothing, another row is lower: "
        "rows within the errors of each other are not told apart."
    )
    return table + text(why, "caption")


def _row(option: Option, names: Sequence[str], measured: Mapping[str, Confirmed]) -> tuple[str, ...]:
    shown = next((measured[name] for name in names if name in measured), None)
    ratio = ""
    if shown is not None:
        ratio = f"{1 - shown.saving:.4f}"
        if shown.low is not None and shown.high is not None:
            ratio += f" ({interval_text(1 - shown.high, 1 - shown.low)})"
    predicted = with_error(option.ratio.ratio, option.ratio.error, 4)
    device = _of_device(option.memory_gib, option.compile_s)
    return option.setup.label, ", ".join(names), predicted, ratio, f"{100 * option.reuse:.0f} %", *device


def _of_device(memory_gib: float | None, compile_s: float | None) -> tuple[str, ...]:
    """Cells of what a device needs; none where nothing is known of it."""
    return () if memory_gib is None or compile_s is None else (f"{memory_gib:.1f}", f"{compile_s:.0f}")
