"""The answer of a tune: one sentence, the file with the configuration, and the commands to copy.

Five words are kept apart: predicted, confirmed, not told apart, keep, cannot tell. Nothing is computed from runs here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import tomli_w

from harness.errors import ExitCode
from harness.kinds import kind_named, kind_of_run
from harness.model.spec import ExperimentSpec, ServerSpec, TuneSpec
from harness.model.spec.server import VALUE_LEVERS
from harness.stacks.vllm.launch import key_arguments
from harness.table import with_error
from harness.tune.confirm import BEST, MOST_BLOCKS, NOT_MEASURED, SMALLEST, Confirmed, Measured, plans_in_words
from harness.tune.diagnose import Diagnosis
from harness.tune.explore import Explored
from harness.tune.plans import MARGIN
from harness.tune.predict import Option
from harness.tune.setups import NUM_DRAFTS, Baseline, Setup
from harness.tune.targets import Capacity

State = Literal["keep", "confirmed", "not told apart", "predicted", "cannot tell", "none within the targets"]
EXIT_CODES = {
    "keep": ExitCode.PASS,
    "confirmed": ExitCode.PASS,
    "predicted": ExitCode.PASS,
    "not told apart": ExitCode.CANNOT_TELL,
    "cannot tell": ExitCode.CANNOT_TELL,
    "none within the targets": ExitCode.RULE_FAILED,
}
MOST_WORDS = 25
"""Of the sentence; what it rests on is the second line."""
CALIBRATE = "measure them (harness server calibrate) and name them (server.cost_model)"


@dataclass(frozen=True)
class Answer:
    """What a tune ends with. option: the configuration that is chosen; None: today's.

    sentence: result, interval and verdict. rests: what it rests on, the second line. measured: what each candidate
    showed. capacities: of goal = "sessions", today's first. why: why there is no more than a prediction, "" where there
    is. artifact: folder of the chosen configuration's model, where it was measured. misfit: how far the costs err,
    where their fit is not good.
    """

    state: State
    sentence: str
    option: Option | None
    measured: tuple[Confirmed, ...] = ()
    why: str = ""
    capacities: tuple[Capacity, ...] = ()
    artifact: str = ""
    rests: str = ""
    misfit: str = ""

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODES[self.state]


def without_search(diagnosis: Diagnosis) -> Answer:
    """The answer for a server of which nothing can be predicted."""
    return Answer("cannot tell", f"Nothing is proposed: {diagnosis.unknown}.", None, why=diagnosis.unknown)


def answer(
    spec: ExperimentSpec,
    explored: Explored,
    measured: Measured = NOT_MEASURED,
    *,
    backend: str = "",
    borrowed: str = "",
) -> Answer:
    """The answer by what was found and measured.

    backend: as runs name it; default: the experiment's. borrowed: that the search took costs that are not this
    server's, in words: what they leave out is not shown to be worthless.
    """
    base = explored.baseline.label
    if explored.is_missed and explored.smallest is None:
        return _none_meets(spec, explored, borrowed)
    if explored.smallest is None or explored.best is None:
        return _kept(
            f"Keep {base}: no configuration within the bounds is predicted to save 1 %.", _most(explored), borrowed
        )
    options = {BEST: explored.best, SMALLEST: explored.smallest}
    by_name = {each.name: each for each in measured.shown}
    proposal = explored.smallest
    if not by_name:
        sentence = _sentence("{change}: {result}", base, proposal, f"{_predicted(proposal)}, predicted, not measured.")
        rests = _second(_beside_prediction(explored), _felt(explored, proposal), borrowed)
        return Answer("predicted", sentence, proposal, why=measured.why, rests=rests)
    better = [name for name in (SMALLEST, BEST) if name in by_name and by_name[name].is_better]
    made = modelled(spec, backend)
    where = f" ({made})" if made else ""
    if not better:
        first = measured.shown[0]
        option = options[first.name]
        felt = f"{made or 'measured'} {first.felt}" if first.felt else _felt(explored, option)
        plans = f"on {plans_in_words(spec, first.num_blocks)}{where}"
        given = _not_less(
            base, option, measured, [plans, f"predicted {100 * option.saving:.1f} % less", felt], borrowed
        )
        is_open = given.state == "not told apart" and not (first.verdict or first.apart or measured.why)
        return replace(given, rests=f"{given.rests} {_what_may_tell(first, made)}") if is_open else given
    # The smallest change that is shown to pay, unless the larger one is shown to pay more.
    chosen = BEST if measured.best_is_better and BEST in better else better[0]
    shown = by_name[chosen]
    beside = [name for name in by_name if name != chosen]
    rest = _beside(beside[0], options[beside[0]], by_name[beside[0]]) if beside else explored.alike_in_words
    sentence = _sentence("{change}: {result}", base, options[chosen], f"{shown.words}, confirmed{where}.")
    shares = [shown.share.share_words if shown.share else "", _todays_share(shown)]
    felt = f"{made or 'measured'} {shown.felt}" if shown.felt else _felt(explored, options[chosen])
    plans = f"on {plans_in_words(spec, shown.num_blocks)}{where}"
    rests = _second(plans, *shares, rest, felt, shown.excess, shown.left_open, shown.beside)
    return Answer("confirmed", sentence, options[chosen], measured.shown, measured.why, rests=rests)


def _none_meets(spec: ExperimentSpec, explored: Explored, borrowed: str) -> Answer:
    """The answer where nothing within the bounds is predicted to meet the targets."""
    wanted = (spec.tune or TuneSpec()).percentile
    near = explored.nearest
    words, felt = ("what runs today", explored.today) if near is None else (near.words, near.felt)
    share = (
        "" if felt is None or felt.share is None else f": {100 * felt.share:.1f} % of {wanted:g} % within the targets"
    )
    rests = [f"nearest: {words}{share}", "" if near is None else _felt(explored, near), borrowed]
    sentence = f"None within the targets: no configuration within the bounds is predicted to hold {wanted:g} %."
    return Answer("cannot tell" if borrowed else "none within the targets", sentence, None, rests=_second(*rests))


def _predicted(option: Option) -> str:
    """ "12.3 +- 0.4 % less device time"."""
    if option.saving >= 0:
        return f"{option.percent} less device time"
    return f"{with_error(-100 * option.saving, 100 * option.ratio.error, 1)} % more device time"


def _felt(explored: Explored, option: Option) -> str:
    """What times to tokens do under a configuration beside today's, in simulation; "" where that is not known."""
    if explored.today is None or option.felt is None:
        return ""
    share = "" if option.felt.share is None else f"; {100 * option.felt.share:.1f} % within the targets"
    return f"simulated {option.felt.beside(explored.today)}{share}"


def _todays_share(shown: Confirmed) -> str:
    return "" if shown.today is None else f"today's: {shown.today.share_words}"


def _sentence(form: str, base: str, option: Option, result: str) -> str:
    """``form`` with what runs today, the change and the result, in shorter words where it had too many."""
    names = ((base, option.words), (base, option.setup.label), ("today's server", "the proposal"))
    sentences = [form.format(base=name, change=change, result=result) for name, change in names]
    shortest = next((each for each in sentences if len(each.split()) <= MOST_WORDS), sentences[-1])
    return _capital(shortest)


def _second(*parts: str) -> str:
    """The second line: "On 12 new plans; ..."."""
    known = [part for part in parts if part]
    return f"{_capital('; '.join(known))}." if known else ""


def _kept(sentence: str, rests: str, borrowed: str, measured: Sequence[Confirmed] = (), why: str = "") -> Answer:
    """That what runs today is kept; by costs that are not this server's nothing is."""
    if borrowed:
        rests, sentence = f"{borrowed}; {rests}; {CALIBRATE}", "Cannot tell without a calibration of this server."
    return Answer("cannot tell" if borrowed else "keep", sentence, None, tuple(measured), why, rests=_second(rests))


def with_declared(found: Answer, declared: str) -> Answer:
    """The answer that says in its first line that nothing showed some settings. declared: which."""
    return replace(found, sentence=f"{found.sentence[:-1]}; declared, not verified.", rests=f"{found.rests} {declared}")


def sessions_answer(  # noqa: PLR0913, PLR0917  # what a tune knows at its end
    spec: ExperimentSpec,
    explored: Explored,
    capacities: Sequence[Capacity],
    why: str = "",
    backend: str = "",
    borrowed: str = "",
) -> Answer:
    """The answer to goal = "sessions": today's configuration, or the smallest that holds more agents."""
    today, *others = capacities
    option = next((each for each in explored.options if others and each.setup == others[0].setup), None)
    where = f" ({made})" if (made := modelled(spec, backend)) else ""
    plans = max((point.num_runs for each in capacities for point in each.points), default=0)
    few = _too_few(capacities, (spec.tune or TuneSpec()).percentile)
    measured = f"on {plans_in_words(spec, plans)} at each number{where}{few}"
    is_told = all(each.has_boundary for each in capacities)
    base, chosen, state, rests = today.setup.label, None, "keep", [measured, borrowed]
    if option is None or not others:
        sentence = f"Keep {base}: {today.predicted} agents at a time, predicted, not measured."
        state, rests = "predicted", [borrowed]
        if today.points:
            # What other configurations hold was predicted, by costs that have to be this server's.
            state = "keep" if is_told and (today.low or today.high) and not borrowed else "not told apart"
            sentence = f"Keep {base}: {today.words}, {'confirmed' if state == 'keep' else 'not told apart'}{where}."
            rests = [measured, "no configuration within the bounds is predicted to hold more", borrowed]
    elif not others[0].points:
        chosen, state, rests = option, "predicted", [borrowed]
        most = f"{others[0].predicted} agents at a time in place of {today.predicted}, predicted, not measured."
        sentence = _sentence("{change}: {result}", base, option, most)
    elif is_told and today.high is not None and others[0].low >= today.high:
        chosen, state = option, "confirmed"
        sentence = _sentence("{change}: {result}", base, option, f"{others[0].words}, confirmed{where}.")
        rests = [measured, f"today's: {today.words}", borrowed]
    else:
        state = "not told apart"
        sentence = _sentence("Keep {base} for now: {change} is {result}", base, option, f"not told apart{where}.")
        rests = [f"today's: {today.words}", f"{option.words}: {others[0].words}", measured, borrowed]
    return Answer(state, sentence, chosen, why=why, capacities=tuple(capacities), rests=_second(*rests))


def _too_few(capacities: Sequence[Capacity], percent: float) -> str:
    """That the runs were too few to show the wanted share; "" where they were not, or where all was told."""
    points = [point for each in capacities for point in each.points if point.verdict == "open"]
    short = next((point for point in points if 100 * point.most_shown < percent), None)
    if short is None:
        return ""
    return f"; {short.num_runs} runs cannot show more than {100 * short.most_shown:.1f} % within the targets"


def modelled(spec: ExperimentSpec, backend: str = "") -> str:
    """What the measurement was of, where it was of no device: "simulated", "emulated". backend: as runs name it."""
    kind = kind_of_run(backend) if backend else kind_named(spec.backend)
    return "" if kind.has_device is not False else "simulated" if kind.is_virtual else "emulated"


OTHERS_IN_WORDS = {BEST: "largest predicted saving", SMALLEST: "smallest change"}


def _beside(name: str, option: Option, shown: Confirmed) -> str:
    not_less = "" if shown.verdict == "less" else ", not told apart from today's"
    return f"{OTHERS_IN_WORDS[name]}: {option.words}: {shown.words}{not_less}"


def _what_may_tell(shown: Confirmed, made: str) -> str:
    """What a person can do where plans did not tell a candidate from today's."""
    ways = ["a quieter host"] * (made != "simulated")
    ways += ["more plans by a longer --budget"] * (shown.num_blocks < MOST_BLOCKS)
    return f"To tell them apart: {' or '.join(ways)}, with --runs of a new folder." if ways else ""


def _not_less(base: str, option: Option, measured: Measured, rests: list[str], borrowed: str) -> Answer:
    first = measured.shown[0]
    if all(each.verdict in ("equal", "more") for each in measured.shown):
        what = "costs more" if first.verdict == "more" else f"costs the same within {100 * MARGIN:g} %"
        sentence = _sentence("Keep {base}: {change} {result}", base, option, f"{what} ({first.words}).")
        return _kept(sentence, "; ".join(filter(None, rests)), borrowed, measured.shown, measured.why)
    told = "not told apart"
    if first.verdict == "less" and first.share is not None:
        told = "out of the targets" if first.share.verdict == "fails" else "not shown within the targets"
    result = f"{told} ({first.words})."
    sentence = _sentence("Keep {base} for now: {change} is {result}", base, option, result)
    withheld = f"withheld: {first.apart}" if first.apart else ""
    share = "" if first.share is None else first.share.share_words
    if first.share is not None and first.share.verdict == "open":
        share += f"; {first.share.num_runs} runs cannot show more than {100 * first.share.most_shown:.1f} %"
    rest = _second(*rests, share, _todays_share(first), withheld, first.beside, borrowed)
    return Answer("not told apart", sentence, None, measured.shown, measured.why, rests=rest)


def _most(explored: Explored) -> str:
    """The most that any configuration is predicted to save."""
    most = max(explored.options, key=lambda option: option.saving, default=None)
    if most is None or most.saving <= 0:
        return "none is predicted to save anything"
    return f"at most {most.percent} ({most.words})"


def _beside_prediction(explored: Explored) -> str:
    """What stands beside a prediction: what does the same here, or the best."""
    best, smallest = explored.best, explored.smallest
    assert best is not None
    assert smallest is not None
    if best.setup == smallest.setup:
        return explored.alike_in_words
    return f"{OTHERS_IN_WORDS[BEST]}: {best.words}: {best.percent}"


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def tuned_text(spec: ExperimentSpec, found: Answer, base: Baseline) -> str:
    """The file of the configuration: the sentence, and a table [server] to put into an experiment."""
    server = base.server
    keys: dict[str, Any] = {
        "max_num_seqs": server.max_num_seqs,
        **({"decode_buckets": list(server.decode_buckets)} if server.decode_buckets else {}),
        **{key: value for key in ("kv_slots", "num_gpu_blocks") if (value := getattr(server, key)) is not None},
    }
    keys |= changes(found, base)
    lines = [f"{found.state}: {found.sentence}", found.rests, *to_copy(spec, found, base)]
    return "".join(f"# {line}\n" for line in lines if line) + tomli_w.dumps({"server": keys})


def changes(found: Answer, base: Baseline) -> dict[str, Any]:
    """The keys of [server] that the chosen configuration changes."""
    keys = {} if found.option is None else base.keys(found.option.setup)
    return {**keys, "artifact": found.artifact} if found.artifact else keys


def to_copy(spec: ExperimentSpec, found: Answer, base: Baseline) -> Iterator[str]:
    """The commands that start the chosen server, for its kind."""
    return commands(spec, base.setup if found.option is None else found.option.setup, base, serves=True)


def commands(
    spec: ExperimentSpec, setup: Setup, base: Baseline, backend: str = "", *, serves: bool = False
) -> Iterator[str]:
    """The commands that start a server with this configuration. backend: as runs name it; default: the experiment's.

    serves: a real vLLM answers somebody, so that its drafter decides: synthetic acceptance makes text without meaning.
    """
    server = base.server
    kind = kind_of_run(backend or spec.backend)
    has_blocks = server.num_gpu_blocks is not None or "num_gpu_blocks" in base.levers(setup)
    served = _changed(setup, base).model_copy(update={"synthetic_acceptance_rates": None} if serves else {})
    if server.is_vllm and (kind.has_device or not server.url):
        served = served.model_copy(update={} if has_blocks else {"num_gpu_blocks": None})
        yield shlex.join(["vllm", "serve", server.model or "MODEL", *key_arguments(served), *server.extra_args])
        return
    if kind.has_device or server.artifact:
        compiled: dict[str, Any] = {"batch_size": setup.max_num_seqs, "decoder_batch_sizes": list(setup.decode_buckets)}
        # A server can be started with fewer slots than were compiled, never with more.
        if setup.kv_slots not in (None, setup.max_num_seqs):
            compiled["kvcache_num_blocks"] = setup.kv_slots
        words = [word for key, value in compiled.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        # Of the model, such as qwen3-4b, which ships.
        yield shlex.join(["harness", "server", "compile", "FILE", *words])
        return
    if server.is_paged:
        yield shlex.join(["vllm", "serve", "MODEL", *key_arguments(served)])
    memory = f" --kv-slots {setup.kv_slots}" if setup.kv_slots is not None else ""
    memory += f" --num-gpu-blocks {setup.num_gpu_blocks}" if has_blocks else ""
    changed = [key for key in base.levers(setup) if key in VALUE_LEVERS]
    memory += "".join(f" --{key.replace('_', '-')} {str(setup.value_of(key)).lower()}" for key in changed)
    if setup.query > 1 and server.synthetic_acceptance_rates:
        drafts = "" if NUM_DRAFTS in changed else f" --num-speculative-tokens {setup.query - 1}"
        rates = ",".join(map(str, server.synthetic_acceptance_rates))
        memory += f"{drafts} --speculative-method {server.speculative_method} --synthetic-acceptance-rates {rates}"
    sizes = ",".join(map(str, setup.decode_buckets))
    rules = f" --rules {server.rules} --cost-model {server.cost_model}" if server.is_paged else ""
    yield f"harness server emulator{rules} --max-num-seqs {setup.max_num_seqs} --decode-buckets {sizes}{memory}"


def _changed(setup: Setup, base: Baseline) -> ServerSpec:
    """Today's server with this configuration; of VALUE_LEVERS what changes alone."""
    kept = {key: getattr(base.server, key) for key in VALUE_LEVERS if key not in base.levers(setup)}
    return setup.on(base.server).model_copy(update=kept)
