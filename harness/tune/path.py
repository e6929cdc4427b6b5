"""The path of a tune: diagnose, price, explore, confirm, answer, each stage kept in the one folder.

The same command goes on after any interruption: sealed runs are not made again, and a search that ended is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from harness.analysis.compare.stopping import sequential_status
from harness.clock import NS_PER_S, Clock, MonotonicClock
from harness.errors import HarnessError, RunInvalidError, SpecError, unknown_name
from harness.kinds import kind_named
from harness.measure.records import layout
from harness.measure.records.run import SealedRun, declared_by
from harness.measure.records.store import RunStore
from harness.model.engine.config import PAGED_STEP_TOKENS
from harness.model.experiment import PlannedRun, resolve
from harness.model.spec import ExperimentSpec, ServerSpec, TuneSpec, parse_experiment
from harness.model.spec.base import tomllib
from harness.model.spec.sections import Basis
from harness.outputs import one_at_a_time
from harness.runner import ExperimentOutcome
from harness.runner.backends import backend_named
from harness.runner.backends.attached import AttachedBackend
from harness.runner.calibrate import QUICK_SWEEPS
from harness.runner.experiment import checked, failed_alike, lasting_fault, refuse_what_is_missing, will_fail_again
from harness.runner.progress import predicted_replay_s
from harness.stacks.rbln.rules.kv_rules import AUTO
from harness.stacks.vllm.graph_flags import chosen_sizes
from harness.stacks.vllm.launch import CORE_STEPS, utilization_for
from harness.tune import confirm, price, sessions
from harness.tune.answer import answer, commands, sessions_answer, tuned_text, with_declared, without_search
from harness.tune.compiling import FOLDER, Compiler, Say, about
from harness.tune.diagnose import Diagnosis, diagnose
from harness.tune.explore import FULL, QUICK, Effort, Explored, explore
from harness.tune.folder import CAPACITIES, CONFIRM, EXPLORED, TuneFolder, folder_name
from harness.tune.page import TuneResult, tune_page
from harness.tune.plans import Question, agents_of, most_at_once, nearby_agents, question_of_run
from harness.tune.setups import Baseline, Setup, checked_levers
from harness.tune.targets import PROPOSED, Capacity, Targets, counts_of_run, point_of

DIAGNOSE_RUNS = 3
RETRIES = 2
"""Times that runs which a busy machine made INVALID are made again."""
SEAL_S = 1.0
"""Seconds that a run takes besides its server's life."""
SEARCH_S = 20.0
"""Seconds that a search is said to take, before it was tried."""
MOST_SWEPT_SEQS = 64
"""Requests at once in a calibration where today's server takes fewer: its KV memory must hold them."""
SAME_PLANS = (
    "every plan replays the same requests, so that an interval holds for these alone; "
    "workload.num_sessions draws fewer sessions of a recording, others each time"
)
AGENTS_AHEAD = "confirm: the predicted most agents at a time and one step beyond, then further out, then between"


class Perform(Protocol):
    """Performs what is missing of an experiment in a folder; the stages' only way to a server."""

    def __call__(self, spec: ExperimentSpec, folder: Path, until_ns: int, **options: Any) -> ExperimentOutcome:
        """until_ns: of the monotonic clock; no run begins after it."""
        ...


class TuneStoppedError(Exception):
    """A person ended the tune; the same command goes on."""


class ServerLife(NamedTuple):
    """Wall seconds of a run besides its replay, and how many runs took them; of none they are assumed."""

    seconds: float
    num_runs: int

    def __str__(self) -> str:
        source = f"as {self.num_runs} runs here took" if self.num_runs else "assumed"
        return f"{self.seconds:.0f} s for its server, {source}"


@dataclass
class Tune:
    """One tune of an experiment with one condition.

    candidates: addresses of servers that somebody else started, or folders of compiled models, by candidate. channel:
    what the measurement counts. borrowed: the costs that the search takes where they are not this server's, in words.
    seen_as: the backend as its runs name it. shown: keys of [server] that are left to a vLLM, with the values that its
    runs show. repeated_s: wall seconds of INVALID runs that were made again.
    """

    spec: ExperimentSpec
    runs: Path
    perform: Perform
    say: Say
    on_search: Callable[[float], None] = lambda _share: None
    effort: Effort = FULL
    candidates: Mapping[str, str] = field(default_factory=dict[str, str])
    clock: Clock = field(default_factory=MonotonicClock)
    channel: Basis = "a"
    borrowed: str = ""
    seen_as: str = ""
    shown: Mapping[str, Any] = field(default_factory=dict[str, Any])
    repeated_s: float = 0.0

    def _detail(self, line: str) -> None:
        """Say a line of a stage, below its own."""
        self.say(f"  {line}")

    def _details(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._detail(line)

    @property
    def settings(self) -> TuneSpec:
        return self.spec.tune or TuneSpec()

    @property
    def first(self) -> PlannedRun:
        """The first run of today's server."""
        return checked(resolve(confirm.with_one_condition(self.spec, self.spec.name, 1))).runs[0]

    @property
    def question(self) -> Question:
        """What is searched."""
        settings, run = self.settings, self.first
        question = question_of_run(run, self._levers)
        server = self._with_sizes(question.server.model_copy(update=self.shown))
        return replace(
            question,
            server=server,
            model=price.with_eager_steps(question.model, server) if self.borrowed else question.model,
            agents=settings.agents,
            memory_gib=settings.memory_gib,
            most_sizes=settings.most_sizes,
            targets=self._targets if settings.goal == "cost" else None,
        )

    def _with_sizes(self, server: ServerSpec) -> ServerSpec:
        """With the sizes that a vLLM captures by itself, where others are searched and none are written."""
        if "decode_buckets" not in self._levers or server.decode_buckets:
            return server
        stacks = [run.manifest.stack for run in self._store.sealed(self._diagnose_name)]
        sizes = chosen_sizes(server, stacks[0].rpartition(" ")[2] if stacks else "")
        if not sizes:
            hint = "Leave decode_buckets out of tune.may_change"
            raise SpecError("this server captures nothing", where="tune.may_change", hint=hint)
        return server.model_copy(update={"decode_buckets": sizes})

    @property
    def _targets(self) -> Targets | None:
        """What [slo] asks of a configuration; None without it."""
        slo = self.spec.slo
        return Targets(slo, self.settings.percentile / 100) if slo.is_set or slo.session_s else None

    @property
    def _levers(self) -> tuple[str, ...]:
        return checked_levers(self.settings.may_change, self.first.server)

    def forecast(self) -> Explored | None:
        """Say what each stage takes, and how sure the answer can be; the quick search behind it, None without."""
        self._check()
        settings, run, guess = self.settings, self.first, self._guessed
        run_s = guess._today_s
        sweeps = checked(resolve(self.sweeps)).runs if price.needs_calibration(self.spec) else ()
        price_s = sum(map(self._run_s, sweeps))
        if confirm.is_repeated(self.spec):
            self.say(SAME_PLANS)
        self.say(f"budget {settings.budget}; at most:")
        if run_s:
            self._detail(f"each run: its replay and {self._life}")
        self._detail(f"diagnose: {DIAGNOSE_RUNS} runs of what runs today{about(DIAGNOSE_RUNS * run_s)}")
        self._detail(f"price: {price.expected_price(self.spec, run.server)}{about(price_s) if price_s else ''}")
        self._detail(f"explore: simulated, about {SEARCH_S:.0f} s")
        quick = None
        if settings.goal == "cost":
            with suppress(HarnessError):
                quick = explore(guess.question, QUICK)
        compile_s = self._forecast_compiles(quick)
        if settings.goal == "sessions":
            self._detail(AGENTS_AHEAD)
            return None
        left_s = confirm.LAST_START * settings.budget_s - (price_s + DIAGNOSE_RUNS * run_s + SEARCH_S + compile_s)
        blocks = confirm.blocks_within(left_s, 3 * run_s, settings.budget_s - left_s)
        self._detail(
            f"confirm: {blocks} plans, each with today's server and at most two candidates"
            f"{about(3 * blocks * run_s)}; it ends when the answer is known"
        )
        if quick:
            costs = "" if guess is self else f", as if it cost what {guess.spec.server.cost_model!r} says"
            self._detail(f"a first look{costs}: {confirm.first_look(quick, blocks, self.spec)}")
        return quick

    @property
    def _guessed(self) -> Tune:
        """With assumed costs where nobody named any; itself where they are named."""
        costs = price.assumed_costs(self.first.server)
        if price.names_costs(self.spec) or costs == self.first.server.cost_model:
            return self
        return replace(self, spec=with_costs(self.spec, costs))

    def _blocks(self, num_conditions: int, before_s: float = 0.0, most: int = 0) -> int:
        """Plans of a measurement that what is left of the budget has room for, after so many seconds."""
        left_s = max(0.0, self._left_s - before_s)
        return confirm.blocks_within(left_s, num_conditions * self._today_s, self.settings.budget_s - left_s, most)

    @property
    def folder(self) -> TuneFolder:
        """Where every stage is kept."""
        return TuneFolder(self.runs / folder_name(self.spec.name))

    @property
    def _store(self) -> RunStore:
        return RunStore(self.folder.path)

    @property
    def _today_s(self) -> float:
        """Wall seconds of a run of today's server: as its runs here took, else as predicted."""
        made = [sum(parts) for parts in wall_seconds(self._store.sealed(self._diagnose_name))]
        return sum(made) / len(made) if made else self._run_s(self.first)

    @property
    def _life(self) -> ServerLife:
        """Wall seconds of a run besides its replay: as runs here took, else as is usual."""
        made = [besides for besides, _ in wall_seconds(self._store.sealed())]
        usual_s = kind_named(self.spec.backend).lifecycle_s
        return ServerLife(sum(made) / len(made) if made else usual_s, len(made))

    @property
    def _diagnose_name(self) -> str:
        return f"{self.spec.name[:56]}-diagnose"

    def _run_s(self, run: PlannedRun) -> float:
        """Wall seconds of a run, its server started and stopped; 0 in virtual time."""
        return 0.0 if kind_named(run.spec.backend).is_virtual else predicted_replay_s(run) + self._life.seconds

    def _check(self) -> None:
        """SpecError where the experiment cannot be tuned as it is asked."""
        _ = self._with_sizes(self.first.server)
        if self.settings.memory and self.first.server.is_vllm:
            what = "is reckoned for a compiled model on an NPU; a vLLM takes what its device has"
            raise SpecError(what, where="tune.memory", hint="Leave it out, or set server.num_gpu_blocks")
        if self.candidates and not confirm.place_key(self.spec):
            what = f"backend {self.spec.backend} starts the servers of its candidates itself"
            raise SpecError(what, where="--candidate", hint="Leave it out")
        if confirm.place_key(self.spec) == "url":
            confirm.refuse_one_address(self.first.server, self.candidates)
        if self.settings.goal == "sessions":
            sessions.check_goal(self.spec)
        if self.spec.slo.itl_ms is not None and self.first.server.is_routed:
            hint = "Set slo.tpot_ms in its place"
            raise SpecError("is not predicted behind a router", where="slo.itl_ms", hint=hint)
        server, backend = self.first.server, backend_named(self.spec.backend)
        is_open = server.rules == AUTO and not server.is_vllm
        if is_open and isinstance(backend, AttachedBackend) and backend.shows_rules(server) is False:
            raise SpecError(
                "nothing shows the scheduling rules of this server",
                where="server.rules",
                hint="`harness init --for URL --stack vllm` writes those of vLLM; of others, measure two settings",
            )

    @property
    def sweeps(self) -> ExperimentSpec:
        """The calibration of today's server; of a vLLM's own sizes, with as many requests at once as a search tries."""
        run = self.first
        server, workload = run.server, run.spec.workload_of(run.condition)
        if server.is_vllm and not server.decode_buckets and "max_num_seqs" in self._levers:
            most = most_at_once(workload, self.settings.agents or nearby_agents(workload))
            server = server.model_copy(update={"max_num_seqs": max(server.max_num_seqs, min(most, MOST_SWEPT_SEQS))})
        if server.is_paged and "max_num_batched_tokens" in self._levers:
            # The longest part of a prompt that the search can ask for.
            budget = max(server.max_num_batched_tokens or PAGED_STEP_TOKENS, QUICK_SWEEPS["prefill_tokens"][-1])
            server = server.model_copy(update={"max_num_batched_tokens": budget})
        return price.calibration_of(self.spec, server)

    def run(self, *, only_explore: bool = False) -> TuneResult:
        """Every stage that is not done, and the answer; HarnessError where a stage cannot be made."""
        _ = self.until_ns
        self._check()
        # Without defaults, so that a key that a later version adds makes it no other tune; nor does its budget.
        settings = self.settings.model_dump(mode="json", exclude={"budget"}, exclude_defaults=True)
        asked = {"experiment": self.spec.model_dump(mode="json", exclude_defaults=True), "tune": settings}
        with one_at_a_time(self.runs, folder_name(self.spec.name), f"tuning {self.spec.name}"):
            TuneFolder.begun(self.runs, self.spec.name, asked)
            found = self._run(only_explore=only_explore)
            if only_explore:
                self.folder.forget()
            return found

    def _run(self, *, only_explore: bool) -> TuneResult:
        diagnosis = None
        if not only_explore:
            self._calibrate()
            diagnosis = self._diagnose()
            if not diagnosis.has_rules:
                return self._ended(TuneResult(self.spec, without_search(diagnosis), diagnosis))
            costs = price.price_of(self.first.server, diagnosis, self._levers)
            self.say(f"price: {costs.words}")
            self.seen_as, self.shown = diagnosis.backend, diagnosis.shown
            self._priced(costs)
        else:
            self.borrowed, self.spec = price.unasked_costs(self.spec, self.first.server), self._guessed.spec
        if self.settings.goal == "sessions":
            return self._sessions(diagnosis, only_explore=only_explore)
        question = self.question
        explored = self._explore(lambda: explore(question, self.effort, on_progress=self.on_search))
        found = confirm.Measured(why="only explored")
        if not only_explore:
            try:
                found = self._confirm(explored)
            except confirm.BudgetTooShortError as error:
                found = confirm.Measured(why=str(error))
                self._detail(found.why)
        given = answer(self.spec, explored, found, backend=self.seen_as, borrowed=self.borrowed)
        if found.declared:
            given = with_declared(given, found.declared)
        return self._ended(TuneResult(self.spec, given, diagnosis, explored))

    def _begin(self, stage: str, words: str) -> None:
        self.folder.begin(stage)
        self.say(f"{stage}: {words}")

    def _calibrate(self) -> None:
        """Measure today's costs where none are named and the backend can start servers."""
        if not price.needs_calibration(self.spec):
            return
        self._begin("price", "no costs are named; a quick calibration of today's server")
        sweeps = self.sweeps
        self._performed(sweeps)
        path = price.fitted(self.folder.path, list(self._store.sealed(sweeps.name)))
        self._priced(price.Price(str(path), False, "a", ""))
        if errors := price.fit_in_words(price.fit_errors(path)):
            self._detail(errors)
        self._detail(f"diagnose{about(DIAGNOSE_RUNS * self._today_s)}: a run takes its replay and {self._life}")

    def _priced(self, costs: price.Price) -> None:
        """From here on with these costs; what a measurement counts follows from them."""
        self.channel = costs.channel
        self.borrowed = costs.words if costs.is_assumed else ""
        if costs.cost_model != self.first.server.cost_model:
            self.spec = with_costs(self.spec, costs.cost_model)

    def _diagnose(self) -> Diagnosis:
        self._begin("diagnose", "what today's server loses")
        spec = confirm.with_one_condition(self.spec, self._diagnose_name, DIAGNOSE_RUNS)
        self._performed(spec)
        runs = list(self._store.sealed(spec.name))
        if not any(run.is_valid for run in runs):
            raise SpecError(
                f"none of {len(runs)} runs is valid: {confirm.commonest_reason(runs)}",
                where=spec.name,
                hint="Give the same command where that is mended, or on a quieter machine: they are made again",
            )
        found = diagnose(runs, confirm.BASE)
        self._details(found.lines())
        if self._today_s:
            self._detail(f"a run took {self._today_s:.0f} s: its replay and {self._life}")
        return found

    def _sessions(self, diagnosis: Diagnosis | None, *, only_explore: bool) -> TuneResult:
        """The stages of goal = "sessions" after the price."""
        targets, question = self._targets, self.question
        assert targets is not None, "the goal was checked"
        search = cache(partial(sessions.explore_agents, question, targets, self.effort, self.on_search))
        explored = self._explore(lambda: search()[0])
        capacities = self.folder.capacities(lambda: search()[1])
        for each in capacities:
            self._details(sessions.boundary(sessions.final(question, targets), each))
        why = "only explored"
        if not only_explore:
            capacities, why = self._measured_agents(capacities)
        given = sessions_answer(self.spec, explored, capacities, why, self.seen_as, self.borrowed)
        return self._ended(TuneResult(self.spec, given, diagnosis, explored))

    def _measured_agents(self, capacities: list[Capacity]) -> tuple[list[Capacity], str]:
        """The capacities with what was measured, round after round until nothing lies between a number that holds and
        one that fails, or the budget ends."""
        share, most = self.settings.percentile / 100, sessions.most_agents(self.question.workload)
        base = confirm.base_of(self.spec, self.folder.explored())
        proposed = {each.name: each.setup for each in capacities if each.name != confirm.BASE}
        places, why = self._placed(proposed, base)
        if len(places) < len(proposed) and confirm.place_key(self.spec):
            return capacities, why
        numbers = [max(1, each.predicted) for each in capacities]
        run_s = self._today_s * max(1.0, max(numbers) / (agents_of(self.question.workload) or 1))
        # Half of the time is for the rounds after the first.
        left_s = self._left_s / 2
        try:
            room = confirm.blocks_within(
                left_s, 2 * len(capacities) * run_s, self.settings.budget_s - left_s, sessions.MOST_PLANS
            )
        except confirm.BudgetTooShortError as error:
            self._detail(str(error))
            return capacities, str(error)
        plans = min(room, sessions.plans_needed(self.spec.slo, share))
        for number in range(1, sessions.ROUNDS + 1):
            wanted = {
                each.name: (confirm.placed_keys(self.spec, base, each.setup, places.get(each.name)), points)
                for each in capacities
                if (points := sessions.next_points(each, most))
            }
            round_s = plans * run_s * sum(len(points) for _, points in wanted.values())
            file = f"agents-{number}.toml"
            # What was begun is ended, or read.
            has_room = number == 1 or (self.folder.path / file).is_file() or round_s < self._left_s
            if not wanted or not has_room:
                break
            spec = self.folder.kept_experiment(file, sessions.round_text(self.spec, wanted, plans, number))
            if self.folder.frozen() is None:
                self.folder.freeze({}, ["agents-1.toml", EXPLORED, CAPACITIES])
            listed = "; ".join(f"{name} with {' and '.join(map(str, points))}" for name, (_, points) in wanted.items())
            self._begin(
                "confirm",
                f"{listed} agents at a time, {confirm.plans_in_words(spec, spec.replicates)} each{about(round_s)}",
            )
            self._performed(spec, fixed_by=self.folder.check_frozen(self._store.sealed()))
            capacities = self._with_points(capacities, spec, share)
        return capacities, ""

    def _with_points(self, capacities: Sequence[Capacity], spec: ExperimentSpec, share: float) -> list[Capacity]:
        """The capacities with the points of one measurement."""
        valid = [run for run in self._store.sealed(spec.name) if run.is_valid]
        points = {each.name: list(each.points) for each in capacities}
        for condition in spec.condition:
            name, _, agents = condition.name.rpartition("-")
            if counts := [counts_of_run(run, spec.slo) for run in valid if run.condition == condition.name]:
                points[name].append(point_of(int(agents), counts, share))
                self._detail(f"{name}: {points[name][-1].words}")
        return [replace(each, points=tuple(points[each.name])) for each in capacities]

    def _explore(self, search: Callable[[], Explored]) -> Explored:
        if (found := self.folder.explored()) is None:
            self._begin("explore", "simulating configurations")
            found = self.folder.keep_explored(search())
        else:
            self.say("explore: as found before")
        self._details(found.lines())
        return found

    def _confirm(self, explored: Explored) -> confirm.Measured:
        candidates, base = confirm.candidates_of(explored), confirm.base_of(self.spec, explored)
        if not candidates:
            return confirm.NOT_MEASURED
        places, why = self._placed({name: option.setup for name, option in candidates.items()}, base)
        without = [name for name in candidates if confirm.place_key(self.spec) and name not in places]
        candidates = {name: option for name, option in candidates.items() if name not in without}
        if not candidates:
            return confirm.Measured(why=why)
        why = f"not measured, as it has no {confirm.place_key(self.spec)}: {', '.join(without)}" if without else ""
        most = 0 if self._targets is None else sessions.plans_needed(*self._targets)
        blocks = confirm.LEAST_BLOCKS if self.folder.frozen() else self._blocks(1 + len(candidates), most=most)
        wanted = confirm.Measurement(candidates, blocks, base, places, self.channel)
        self._hold(wanted)
        spec = confirm.freeze(self.folder, self.spec, wanted)
        beside = f"{len(candidates)} candidate{'s' * (len(candidates) != 1)}"
        most_s = (1 + len(candidates)) * spec.replicates * self._today_s
        what = f"today's server and {beside} on at most {confirm.plans_in_words(spec, spec.replicates)}{about(most_s)}"
        self._begin("confirm", what)
        fixed_by, left_s = self.folder.check_frozen(self._store.sealed(spec.name)), self._left_s
        self._performed(spec, until_decided=True, fixed_by=fixed_by)
        runs = list(self._store.sealed(spec.name))
        status = sequential_status(spec, runs, spec.stop) if runs and spec.stop else None
        if self.is_over and not (status and status.is_decided):
            given_s = self.settings.budget_s
            minutes = max(math.ceil((given_s - left_s + most_s / confirm.LAST_START) / 60), int(given_s // 60) + 1)
            has_room = f"--budget {minutes}min has room for all {spec.replicates} plans"
            why = f"{confirm.budget_ended(self.settings.budget, status)}; {has_room}"
            self._detail(why)
        if num_invalid := sum(not run.is_valid for run in runs):
            dropped = f"{num_invalid} of {len(runs)} runs are INVALID and do not count"
            self._detail(f"{dropped}: {confirm.commonest_reason(runs)}")
        shown = tuple(map(partial(self._with_share, runs), confirm.confirmed(spec, runs, status))) if status else ()
        for each in shown:
            self._details(each.lines())
        return confirm.Measured(shown, bool(status) and confirm.best_is_better(status), why, declared_by(runs))

    def _with_share(self, runs: Sequence[SealedRun], shown: confirm.Confirmed) -> confirm.Confirmed:
        """With the share of its runs that met the targets, and today's, where there are any."""
        if self._targets is None:
            return shown
        slo, share = self._targets
        points = [
            point_of(0, [counts_of_run(run, slo) for run in runs if run.is_valid and run.condition == name], share)
            for name in (shown.name, confirm.BASE)
        ]
        return replace(shown, share=points[0], today=points[1])

    def _commands(self, setups: Mapping[str, Setup], base: Baseline) -> list[str]:
        """What starts the server of each candidate."""
        has_log = self.first.server.step_log and confirm.place_key(self.spec) == "url"
        return [
            f"{name}: {f'{CORE_STEPS.file_variable}={name}.core_steps.jsonl ' if has_log else ''}{line}"
            for name, setup in setups.items()
            for line in commands(self.spec, setup, base, self.seen_as)
        ]

    def _placed(self, setups: Mapping[str, Setup], base: Baseline) -> tuple[dict[str, str], str]:
        """The address or the compiled model of each candidate that has one, and why others have none.

        Those that were given or measured before stay; what can be compiled here is compiled.
        """
        if unknown := sorted(self.candidates.keys() - setups):
            raise unknown_name("candidate", unknown[0], setups)
        places = {**self.folder.places(confirm.place_key(self.spec)), **self.candidates}
        missing = {name: setup for name, setup in setups.items() if name not in places}
        if not missing or self.folder.frozen() or not confirm.place_key(self.spec):
            return places, ""
        if compiler := self._compiler(base):
            return self._compiled(compiler, missing, places)
        if places:
            return places, ""
        self._details(self._commands(missing, base))
        is_url = confirm.place_key(self.spec) == "url"
        what = "start these servers beside today's" if is_url else "compile these models"
        place = "FOLDER" if not is_url else "URL,FILE" if self.first.server.step_log else "URL"
        options = " ".join(f"--candidate {name}={place}" for name in missing)
        return {}, f"{what}, then give the same command with {options}"

    def _compiler(self, base: Baseline) -> Compiler | None:
        """What compiles the models of candidates; None where none is compiled here, which is said."""
        if confirm.place_key(self.spec) != "artifact":
            return None
        try:
            return Compiler.of(self.spec.backend, base, self.folder.path / FOLDER)
        except HarnessError as error:
            self._detail(f"nothing is compiled here: {error}")
            return None

    def _forecast_compiles(self, quick: Explored | None) -> float:
        """Say what will be compiled, as a first look has it; the seconds that it takes, as far as they are known."""
        base = confirm.base_of(self.spec, None)
        if (compiler := self._compiler(base)) is None:
            return 0.0
        if quick is None:
            self._detail(f"compile: a candidate's model{compiler.time_of(base.setup)}")
            return compiler.seconds(base.setup)
        setups = {
            name: option.setup for name, option in confirm.candidates_of(quick).items() if name not in self.candidates
        }
        return compiler.needed(setups, lambda line: self._detail(f"compile: {line}"))

    def _compiled(
        self, compiler: Compiler, setups: Mapping[str, Setup], places: Mapping[str, str]
    ) -> tuple[dict[str, str], str]:
        """The places with those of the models that are compiled now, and why the stack refuses others. What may be
        mended raises its error, so that nothing is fixed before the same command tried again."""
        self._begin("compile", "the models of the candidates")
        seconds = compiler.needed(setups, self._detail)
        if seconds:
            self._blocks(1 + len(setups) + len(places), seconds)
        made, reason = compiler.made(setups, self._detail)
        return {**places, **made}, reason

    def _hold(self, wanted: confirm.Measurement) -> None:
        """SpecError where a candidate that has a place is not as it was asked for, before anything is frozen."""
        if not wanted.places:
            return
        if self.first.server.step_log and (lacking := [name for name, at in wanted.places.items() if "," not in at]):
            raise SpecError(
                f"server.step_log is of today's server: {', '.join(lacking)} needs a step log of its own",
                where="--candidate",
                hint=f"--candidate {lacking[0]}=URL,FILE, started with {CORE_STEPS.file_variable}=FILE",
            )
        text = confirm.confirm_text(self.spec, wanted)
        try:
            runs = checked(resolve(parse_experiment(tomllib.loads(text), where=CONFIRM))).runs
            if confirm.place_key(self.spec) == "url":
                refuse_what_is_missing(runs)
        except SpecError as error:
            setups = {name: option.setup for name, option in wanted.candidates.items()}
            hint = f"Asked for: {'; '.join(self._commands(setups, wanted.base))}"
            where = f"{'--candidate ' * bool(self.candidates)}{error.where or ''}".strip() or None
            raise SpecError(error.what, where=where, hint=hint) from error

    def _performed(self, spec: ExperimentSpec, **options: Any) -> ExperimentOutcome:
        """The experiment with all its runs; runs that a busy machine made INVALID are repeated.

        RunInvalidError where the server makes every run INVALID; the next call makes such runs again.
        """
        before = self._store.sealed(spec.name)
        mended = {"retry_invalid": True} if any(lasting_fault(run) or failed_alike(run) for run in before) else {}
        outcome = self.perform(spec, self.folder.path, self.until_ns, **options, **mended)
        # Under a rule they were repeated before it looked.
        for _ in range(0 if options.get("until_decided") else RETRIES):
            if outcome.was_interrupted or all(will_fail_again(run) for run in outcome.invalid_runs):
                break
            self.repeated_s += sum(map(sum, wall_seconds(outcome.invalid_runs)))
            outcome = self.perform(spec, self.folder.path, self.until_ns, retry_invalid=True, **options)
        if outcome.ended_by:
            hint = "Then give the same command; of a changed file with --runs of a new folder"
            raise RunInvalidError(outcome.ended_by, where=spec.name, hint=hint)
        if (outcome.was_interrupted or not outcome.is_complete) and not self.is_over:
            raise TuneStoppedError
        return outcome

    @cached_property
    def _begun_ns(self) -> int:
        """When this call began, of the monotonic clock."""
        return self.clock.now_ns()

    @property
    def until_ns(self) -> int:
        """When the last run of this call may begin, of the monotonic clock; repeats of INVALID runs count apart."""
        return self._begun_ns + round((confirm.LAST_START * self.settings.budget_s + self.repeated_s) * NS_PER_S)

    @property
    def is_over(self) -> bool:
        return not self._left_s

    @property
    def _left_s(self) -> float:
        return max(0.0, (self.until_ns - self.clock.now_ns()) / NS_PER_S)

    def _ended(self, found: TuneResult) -> TuneResult:
        """Write the answer's files; with the losses of the chosen configuration, where it was measured."""
        runs = list(self._store.sealed(f"{self.spec.name[:56]}-confirm"))
        chosen = next((name for name, option in found.candidates.items() if option == found.answer.option), "")
        if any(run.is_valid and run.condition == chosen for run in runs):
            found = found._replace(before=diagnose(runs, confirm.BASE), after=diagnose(runs, chosen))
        places = {} if found.answer.option is None else self.folder.places("artifact")
        misfit = price.misfit_of(self.first.server.cost_model) if found.explored and not self.borrowed else ""
        made = replace(found.answer, artifact=places.get(chosen) or places.get(PROPOSED, ""), misfit=misfit)
        made = replace(made, rests=" ".join(filter(None, (made.rests, misfit, self._memory_in_words(found)))))
        found = found._replace(answer=made)
        self.folder.end(made.state, tuned_text(self.spec, made, found.base), tune_page(found))
        return found

    def _memory_in_words(self, found: TuneResult) -> str:
        """The flag that has room for the chosen KV blocks, where the log of today's server shows its memory."""
        option, runs = found.answer.option, list(self._store.sealed(self._diagnose_name))
        blocks, wanted = (
            None if each is None else each.num_gpu_blocks
            for each in (found.explored and found.explored.baseline, option and option.setup)
        )
        log = runs[0].path / layout.SERVER_LOG if runs else None
        if blocks is None or wanted in (None, blocks) or log is None or not log.is_file():
            return ""
        share = utilization_for(log.read_text(encoding="utf-8", errors="replace"), blocks, wanted)
        if share is None:
            return ""
        where = f"--gpu-memory-utilization {share:g} has room for" if share <= 1 else "the device has no room for"
        return f"{where[0].upper()}{where[1:]} {wanted:,} KV blocks."


def with_costs(spec: ExperimentSpec, cost_model: str) -> ExperimentSpec:
    """The experiment with the costs of this file."""
    return spec.model_copy(update={"server": spec.server.model_copy(update={"cost_model": cost_model})})


def wall_seconds(runs: Sequence[SealedRun]) -> list[tuple[float, float]]:
    """Wall seconds of each sealed run besides its replay, and of its replay; none of simulated runs."""
    spans: list[tuple[float, float]] = []
    for run in runs:
        at_ns, second = run.manifest.timings, run.manifest.clock.scale * NS_PER_S
        if "server_stopped_ns" in at_ns:
            replay_s = (at_ns["replay_end_ns"] - at_ns["replay_start_ns"]) / second
            whole_s = (at_ns["server_stopped_ns"] - at_ns["server_start_ns"]) / second + SEAL_S
            spans.append((whole_s - replay_s, replay_s))
    return spans
