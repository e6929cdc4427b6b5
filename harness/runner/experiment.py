"""The runs of an experiment in their order; a resumed experiment makes the planned runs that are not sealed.

What cannot be measured is refused before the first run: unknown analyses, missing models, ports and server settings,
in one error for all conditions. Every condition of a replicate has the same drawn plan. There is no progress file:
sealed runs are done.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.analysis.stats import grouped
from harness.errors import (
    HarnessError,
    RecordsError,
    RunInvalidError,
    ServerError,
    SpecError,
    check_all,
    faults_of,
    raise_all,
)
from harness.judge.catalogue import analysis_named
from harness.judge.prereg import RunAuthorization
from harness.judge.prereg.repository import file_sha256
from harness.kinds import kind_named, kind_of_run
from harness.measure.records import layout
from harness.measure.records.inputs import changed_inputs
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import ABORTED
from harness.measure.records.store import RunStore
from harness.measure.records.writer import keep_for_retry
from harness.model.engine.config import changed_keys, differences, keys_shown, requested_settings
from harness.model.experiment import PlannedRun, PlannedRuns, resolve
from harness.model.spec import ExperimentSpec
from harness.model.spec.server import HARNESS_KEYS, NEWER_KEYS
from harness.outputs import check_runs_folder, one_at_a_time
from harness.plugins import service
from harness.redact import redacted_text
from harness.run_key import RunKey
from harness.runner.backends import backend_named
from harness.runner.backends.base import Replicas
from harness.runner.fleet.driver import perform_on_devices
from harness.runner.progress import (
    Began,
    Made,
    ProgressSink,
    RunProgress,
    StopFlag,
    StoppingMonitor,
    declared_rule,
    silent,
)
from harness.runner.run import RunContext
from harness.stacks.vllm.graph_flags import speculative_config

ANSWERED = ("ok", ABORTED)
# Reasons that no repetition changes.
LASTING = ("setting-differs:", "setting-unshown:", "metrics-missing:")
_NUMBERS = re.compile(r"\b[\da-f-]*\d[\da-f-]*\b", re.IGNORECASE)
REPEATS = 2
URL_EACH = "Start a server for each condition and name it: server.url in [[condition]]"
AS_SHOWN = "Write what the server shows (`harness doctor --url URL` lists it), or start it as the file says"
DECLARE = "Where you know that they hold, set server.declared = true: reports then say declared, not verified"


def checked(planned: PlannedRuns) -> PlannedRuns:
    """The same runs; SpecError for an unknown analysis, scaled time on a real server, or an unfit compiled model."""
    spec = planned.spec
    check_all(
        partial(analysis_named, spec.analysis, spec.name),
        partial(_refuse_scaled_time, spec),
        partial(_refuse_idle_routers, planned),
        partial(_refuse_random_drafts, spec),
        partial(_check_conditions, planned),
        where=f"experiment {spec.name!r}",
    )
    return planned


def _refuse_scaled_time(spec: ExperimentSpec) -> None:
    if spec.time_scale != 1.0 and not kind_named(spec.backend).scales_time:
        raise SpecError(
            f"{spec.backend} runs in real time and cannot be scaled by {spec.time_scale:g}",
            where="time_scale",
            hint="Remove time_scale",
        )


def _refuse_random_drafts(spec: ExperimentSpec) -> None:
    """SpecError for conditions that differ in drafts where a real drafter decides: prompts are random tokens.

    Source: vLLM 0.30.0 to 0.33.0, config/speculative.py, rejection_sample_method.
    """
    configs = {each.name: speculative_config(spec.server_of(each).extra_args) for each in spec.condition}
    drafts = {name: (config.get("method"), config.get("num_speculative_tokens")) for name, config in configs.items()}
    for name, config in configs.items():
        if len({*drafts.values()}) > 1 and config and config.get("rejection_sample_method") != "synthetic":
            raise SpecError(
                "compares numbers of drafts, and prompts are random tokens, of which a real drafter guesses hardly any",
                where=f"condition {name!r}: server.extra_args",
                hint="Set rejection_sample_method and synthetic_acceptance_rates in --speculative-config; "
                "`harness server sizes --from core_steps.jsonl` prints those of a recording",
            )


def _check_conditions(planned: PlannedRuns) -> None:
    """Refuse what no host could run: every fault of the conditions, named with the first that has it."""
    backend = backend_named(planned.spec.backend)
    faults: dict[str, HarnessError] = {}
    for name, runs in planned.by_condition.items():
        for fault in faults_of(partial(backend.check_run, runs[0])):
            named = SpecError(fault.what, where=f"condition {name!r}: {fault.where}", hint=fault.hint)
            faults.setdefault(str(fault), named)
    raise_all([*faults.values()], where=f"experiment {planned.spec.name!r}")


def _refuse_idle_routers(planned: PlannedRuns) -> None:
    """SpecError for a router that a condition sets although it has one server."""
    servers = {name: runs[0].server for name, runs in planned.by_condition.items()}
    has_any = any(server.is_routed for server in servers.values())
    for name, runs in planned.by_condition.items():
        is_set = "router" in runs[0].condition.server or (servers[name].router is not None and not has_any)
        if is_set and not servers[name].is_routed:
            raise SpecError(
                "one server has no router, and its policy changes nothing",
                where=f"condition {name!r}: server.router",
                hint="Set server.replicas = 2 or more, or leave the router out",
            )


def check_hosts(runs: Iterable[PlannedRun]) -> None:
    """Refuse, before anything starts, runs that need something this host does not have now."""
    runs = list(runs)
    check_all(*_host_checks(runs), where="this host")
    refuse_what_is_missing(runs)


def _host_checks(runs: Iterable[PlannedRun]) -> Iterator[Callable[[], object]]:
    for run in {run.condition.name: run for run in runs}.values():
        yield partial(backend_named(run.spec.backend).check_host, run.server)
        if run.server.is_routed and not run.server.url:
            router: Replicas = service("replicas", where="server.replicas")
            yield partial(router.check, run.server, kind_named(run.spec.backend))


def refuse_what_is_missing(runs: Sequence[PlannedRun]) -> None:
    """One error for everything that running servers lack, and for settings that nothing would show."""
    lacks: list[str] = []
    for group in _by_server(runs):
        url = redacted_text(group[0].server.url)
        lacks += [f"{url}: {lack}" for lack in backend_named(group[0].spec.backend).lacks(group)]
    try:
        refuse_unshown_settings(runs)
    except SpecError as error:
        if not lacks:
            raise
        lacks.append(f"{error.what}. {error.hint}")
    if not lacks:
        return
    raise ServerError(
        "; ".join(lacks),
        where=f"backend {runs[0].spec.backend}",
        hint="Nothing was performed. `harness doctor --url URL` asks a server again",
    )


def _by_server(runs: Iterable[PlannedRun]) -> list[list[PlannedRun]]:
    return [*grouped(runs, lambda run: (run.server.url, run.server.api_key_env, run.server.model)).values()]


def refuse_unshown_settings(runs: Iterable[PlannedRun]) -> None:
    """SpecError unless every setting that a condition varies is, or will be, shown in each condition."""
    problems: list[str] = []
    hints: list[str] = []
    of_conditions = {run.condition.name: run for run in runs}
    addresses = [run.server.url for run in of_conditions.values()]
    for name, run in of_conditions.items():
        backend, server = backend_named(run.spec.backend), run.server
        varied = run.spec.varied_settings - HARNESS_KEYS
        if not varied and backend.kind.is_restarted:
            continue
        in_force = backend.in_force(server)
        changed = differences(server, in_force, varied)
        kept = [] if backend.kind.is_restarted else differences(server, in_force, changed_keys(server) - varied)
        problems += [f"condition {name}: {text}" for text in (*changed, *kept)]
        wanted = requested_settings(server)
        # Without a newer key nothing is done that would show it.
        unset = {key for key in NEWER_KEYS if wanted.get(key) is None}
        unshown = () if server.declared else sorted(varied - backend.shown_keys - keys_shown(in_force) - unset)
        if unshown:
            named = ", ".join(f"{key} = {wanted[key]}" for key in unshown)
            problems.append(f"condition {name}: nothing shows {named}")
        if backend.kind.is_restarted:
            hints += ["Leave those keys out, or choose another backend"] * bool(changed or unshown)
        else:
            # A server of its own helps a condition that shares one with others.
            is_shared = addresses.count(server.url) > 1
            hints += [URL_EACH] * bool(is_shared and (changed or unshown))
            hints += [AS_SHOWN] * bool(kept or (changed and not is_shared))
        hints += [DECLARE] * bool(unshown)
    if problems:
        where = f"backend {next(iter(of_conditions.values())).spec.backend}"
        raise SpecError("; ".join(problems), where=where, hint=". ".join(dict.fromkeys(hints)))


# Missing runs that are named; the rest is counted.
MAX_NAMED = 6
_LOAD_HINT = "Load it first: run_experiment(load_experiment('demo'), runs_root=...)"


@dataclass(frozen=True, slots=True)
class ExperimentOutcome:
    """The result of ``run_experiment``. runs: every sealed run of the experiment, earlier ones included.

    missing: labels of the planned runs that are not sealed. is_decided: the stopping rule has a verdict on every
    comparison, so that no run is needed any more. ended_by: how every request of the first run failed, or which
    settings of somebody else's server differ, where that ended the experiment.
    """

    spec: ExperimentSpec
    runs: tuple[SealedRun, ...]
    num_planned: int
    num_performed: int
    was_interrupted: bool
    is_decided: bool = False
    ended_by: str = ""
    missing: tuple[str, ...] = ()

    def __repr__(self) -> str:
        counts = f"{len(self.runs)} of {self.num_planned} runs are sealed, {len(self.invalid_runs)} INVALID"
        missing = f"; {self.missing_words}" if self.missing else ""
        return f"ExperimentOutcome {self.spec.name!r}: {counts}, {self.num_performed} made now{missing}"

    @property
    def missing_words(self) -> str:
        """ "missing: base/2, more/2 and 4 more": the first of them by name."""
        rest = len(self.missing) - MAX_NAMED
        more = f" and {rest} more" if rest > 0 else ""
        return f"missing: {', '.join(self.missing[:MAX_NAMED])}{more}"

    @property
    def invalid_runs(self) -> tuple[SealedRun, ...]:
        return tuple(run for run in self.runs if not run.is_valid)

    @property
    def is_complete(self) -> bool:
        return self.is_decided or len(self.runs) >= self.num_planned

    def require_valid(self) -> ExperimentOutcome:
        """This outcome; RunInvalidError, which names the first, where a run is missing or INVALID."""
        invalid = ""
        if self.invalid_runs:
            first = self.invalid_runs[0]
            invalid = (
                f"{len(self.invalid_runs)} of {len(self.runs)} runs are invalid, first {first.condition}/"
                f"{first.replicate}: {'; '.join(first.invalid_reasons)}"
            )
        if not self.is_complete:
            what = f"{len(self.runs)} of {self.num_planned} runs are sealed; {self.missing_words}"
            raise RunInvalidError(
                f"{what}; {invalid}" if invalid else what,
                where=self.spec.name,
                hint="Continue them: run_experiment(..., resume=True)",
            )
        if invalid:
            hint = "They are left out of every comparison; `harness runs` lists them"
            raise RunInvalidError(invalid, where=self.spec.name, hint=hint)
        return self


def run_experiment(  # noqa: PLR0913  # an option each
    spec: ExperimentSpec,
    *,
    runs_root: Path | str,
    resume: bool = False,
    on_progress: ProgressSink = silent,
    stop: StopFlag | None = None,
    spec_source: str = "",
    authorization: RunAuthorization | None = None,
    retry_invalid: bool = False,
    until_decided: bool = False,
    keep_going: bool = False,
    fixed_by: str = "",
) -> ExperimentOutcome:
    """Perform every planned run that is not sealed yet, and return all sealed runs of the experiment.

    resume: allow runs sealed earlier; without it they are an error.
    Raises SpecError before anything starts; ServerError when a server cannot be run; RecordsError when records cannot
    be written. An INVALID run is kept, and the experiment goes on; unless ``keep_going`` is False and it is the first
    run of this call, all of whose requests failed alike, or its server is somebody else's and has other settings.
    retry_invalid: repeat the INVALID ones too; they are kept, and the new runs name them. Frozen runs: at most
    ``limits.retries`` times each.
    authorization: of a preregistration; makes every run confirmatory. Without an authorization runs stay exploratory.
    until_decided: perform the blocks of the stopping rule's budget, and end when the rule has decided; SpecError
    without a rule. An INVALID run that is not frozen is then repeated at once, REPEATS times, before a look.
    fixed_by: SHA-256 of a file that fixed these runs beforehand, kept in each.
    """
    if not isinstance(spec, ExperimentSpec):  # pyright: ignore[reportUnnecessaryIsInstance]  # notebooks check no types
        raise SpecError(f"takes an experiment, not {spec!r:.80}", where="run_experiment", hint=_LOAD_HINT)
    stop, store = stop or StopFlag(), RunStore(Path(runs_root))
    spec = spec.until_decided(spec_source) if until_decided else spec
    if until_decided and spec.fleet is not None:
        raise SpecError(
            "blocks of one device are correlated, and the stopping rule takes every block as independent",
            where="--until decided",
            hint="Leave it out, or run on one device without [fleet]",
        )
    with one_at_a_time(store.root, spec.name, f"making runs of {spec.name}"):
        planned, todo, again = what_to_do(
            spec, store.root, resume=resume, retry_invalid=retry_invalid, authorization=authorization
        )
        if authorization is not None:
            authorization.ledger.admit(todo, store.sealed(spec.name))
        monitor = _monitor(store, planned, again) if until_decided else None
        if monitor is not None and monitor.is_decided:
            # A repetition that was asked for is made all the same: until then it can still change the decision.
            todo = [run for run in todo if run.key in again]
        check_hosts(todo)
        for group in _by_server(todo):
            backend_named(spec.backend).ask_ahead(group)
        progress = RunProgress(planned, todo, on_progress, monitor)
        context = RunContext(store.root, spec_source, authorization, on_progress, stop, fixed_by=fixed_by)
        ended_by, repeats = "", REPEATS if monitor is not None and authorization is None else 0
        if spec.fleet is None or kind_named(spec.backend).is_virtual:
            for event in perform_in_order(todo, context, again, repeats):
                progress.add(event)
                if isinstance(event, Made) and not keep_going:
                    is_first = len(progress.performed) == 1 < len(todo)
                    ended_by = lasting_fault(event.run) or (failed_alike(event.run) if is_first else "")
                if (progress.is_decided and again.keys() <= set(progress.performed)) or ended_by:
                    break
        else:
            over_hosts = "fleet over hosts" if spec.fleet.hosts else ""
            perform_fleet = service(over_hosts, where="fleet.hosts") if over_hosts else perform_on_devices
            perform_fleet(todo, context, again, progress.add)
        sealed = _all_sealed(store, spec, progress.performed)
    keys = {run.key for run in sealed}
    return ExperimentOutcome(
        spec,
        sealed,
        len(planned),
        len(progress.performed),
        stop.after_run,
        is_decided=progress.is_decided,
        ended_by=ended_by,
        missing=tuple(run.label for run in planned if run.key not in keys),
    )


def perform_in_order(
    runs: Sequence[PlannedRun], context: RunContext, again: Container[RunKey], repeats: int = 0
) -> Iterator[Began | Made]:
    """Make runs one after another; ends early when the user stops it or the caller stops iterating.

    again: runs that repeat an INVALID run, which is kept. repeats: of a run that is INVALID, at once. Raises as the
    backend does.
    """
    for run in runs:
        if context.stop.after_run:
            return
        yield Began(run.key)
        if run.key in again:
            # Only now: INVALID runs that are not reached keep their names.
            keep_for_retry(RunStore(context.runs_root).run(*run.key))
        sealed = backend_named(run.spec.backend).perform(run, context)
        for _ in range(repeats):
            if sealed is None or sealed.is_valid or will_fail_again(sealed) or context.stop.after_run:
                break
            keep_for_retry(sealed)
            sealed = backend_named(run.spec.backend).perform(run, context)
        if sealed is None:  # aborted by the user
            return
        yield Made(sealed)


def lasting_fault(run: SealedRun) -> str:
    """Why a run on somebody else's server is INVALID, and the remedy, where the same server repeats it; "" else."""
    if run.is_valid or kind_of_run(run.manifest.backend).is_restarted:
        return ""
    faults = [each for each in run.manifest.findings if each.severity == "invalid"]
    return next((str(each) for each in faults if f"{each.code}:" in LASTING), "")


def failed_alike(run: SealedRun) -> str:
    """The common failure of all requests of a run, as the first reported it; "" where an answer came or they differ.

    Numbers and ids in the messages may differ.
    """
    if run.is_valid:
        return ""
    rows = run.table("requests").select(["status", "error"]).to_pylist()
    sent = [row for row in rows if row["status"] != "not_sent"]
    kinds = {(row["status"], _NUMBERS.sub("#", row["error"])) for row in sent}
    if len(kinds) != 1 or sent[0]["status"] in ANSWERED:
        return ""
    return f"{sent[0]['status']}: {sent[0]['error']}" if sent[0]["error"] else str(sent[0]["status"])


def will_fail_again(run: SealedRun) -> bool:
    """Whether no repetition of this INVALID run helps: INVALID for the same reason, or refused by its freeze."""
    is_lasting = any(reason.startswith(LASTING) for reason in run.invalid_reasons)
    is_frozen, num_tries = run.manifest.preregistration is not None, len(run.manifest.earlier_tries)
    return is_lasting or (is_frozen and num_tries >= run.limits.retries) or bool(failed_alike(run))


def _all_sealed(store: RunStore, spec: ExperimentSpec, performed: Iterable[RunKey]) -> tuple[SealedRun, ...]:
    """Every sealed run of an experiment; RecordsError where a run of this call is gone."""
    sealed = tuple(store.sealed(spec.name))
    if lost := [key for key in performed if key not in {run.key for run in sealed}]:
        raise RecordsError(
            f"{len(lost)} runs were sealed and are gone, first {'/'.join(map(str, lost[0]))}",
            where=str(store.root),
            hint="Something removed or moved the folder while this was running",
        )
    return sealed


def _monitor(store: RunStore, planned: PlannedRuns, again: Mapping[RunKey, SealedRun]) -> StoppingMonitor:
    """The declared rule, applied to the sealed runs that are kept; SpecError where a run did not declare it."""
    keys = {run.key for run in planned}
    sealed = [run for run in store.sealed(planned.spec.name) if run.key in keys]
    rule = declared_rule(planned.spec, sealed)
    return StoppingMonitor(planned.spec, rule, (run for run in sealed if run.key not in again))


def what_to_do(
    spec: ExperimentSpec, runs_root: Path, *, resume: bool, retry_invalid: bool, authorization: RunAuthorization | None
) -> tuple[PlannedRuns, list[PlannedRun], Mapping[RunKey, SealedRun]]:
    """All runs of an experiment, those to perform now, and the INVALID ones that some of these repeat.

    Raises SpecError where ``run_experiment`` would, before anything is written.
    """
    store = RunStore(check_runs_folder(runs_root))
    # The runs of an authorization are resolved already.
    planned = authorization.planned if authorization is not None and authorization.planned.spec == spec else None
    planned = planned or resolve(spec)
    if faults_of(refused := partial(checked, planned)):
        # What this host lacks is named in the same breath.
        check_all(refused, *_host_checks(planned), where=f"experiment {spec.name!r}")
    again = _to_repeat(store, planned, authorization) if retry_invalid else {}
    return planned, _missing(store, planned, resume=resume, authorization=authorization, again=again), again


def _to_repeat(
    store: RunStore, planned: PlannedRuns, authorization: RunAuthorization | None
) -> dict[RunKey, SealedRun]:
    """INVALID runs of the experiment; of frozen ones those with repetitions left, refused where none has any."""
    keys = {run.key for run in planned}
    invalid = {run.key: run for run in store.sealed(planned.spec.name) if run.key in keys and not run.is_valid}
    if authorization is None:
        return invalid
    allowed = planned.spec.limits.retries
    repeatable = {key: run for key, run in invalid.items() if len(run.manifest.earlier_tries) < allowed}
    if invalid and not repeatable:
        first = next(iter(invalid.values()))
        raise SpecError(
            f"{first.label} is INVALID, and the {allowed} repetitions that this freeze allows are used up",
            where="--retry-invalid",
            hint="It stays INVALID; freeze a new experiment with larger limits.retries",
        )
    return repeatable


def _missing(
    store: RunStore,
    planned: PlannedRuns,
    *,
    resume: bool,
    authorization: RunAuthorization | None,
    again: Mapping[RunKey, SealedRun],
) -> list[PlannedRun]:
    """Planned keys minus sealed keys, and those to repeat; refuses sealed runs of another plan or configuration."""
    name = planned.spec.name
    sealed = {run.key: run for run in store.sealed(name)}
    frozen = next((run.manifest.preregistration for run in sealed.values() if run.manifest.preregistration), None)
    if sealed and not resume and frozen is not None and authorization is None:
        raise SpecError(
            f"{len(sealed)} sealed runs of experiment {name!r} exist already, made from its freeze {frozen.path}",
            where=str(store.root / name),
            hint=f"That one goes on with harness run --confirmatory {frozen.path} --resume. Measure a changed file "
            "under a name and a base_seed of its own: see docs/guides/npu.md, section 5",
        )
    if sealed and not resume:
        raise SpecError(
            f"{len(sealed)} sealed runs of experiment {name!r} exist already",
            where=str(store.root / name),
            hint="Use --resume to continue them, --runs to write elsewhere, or rename the experiment"
            if authorization is None
            else "Use --resume to continue them"
            if frozen is not None
            else "They were not made from this freeze: use --runs to write elsewhere",
        )
    for run in planned:
        if run.key in sealed:
            # A kept run counts like a new one, so each of its bytes must be as it was sealed.
            sealed[run.key].verify()
            _require_same_inputs(sealed[run.key], run, authorization)
    return [run for run in planned if run.key not in sealed or run.key in again]


def _require_same_inputs(run: SealedRun, planned: PlannedRun, authorization: RunAuthorization | None) -> None:
    """A sealed run counts only when its inputs are those that the experiment asks for now."""
    changed = changed_inputs(run, planned.spec, planned.condition)
    expected: dict[str, object] = {
        "plan": planned.plan.hash,
        "preregistration": None if authorization is None else authorization.record.sha256,
    }
    sealed: dict[str, object] = {
        "plan": run.manifest.plan_hash,
        "preregistration": None if run.manifest.preregistration is None else run.manifest.preregistration.sha256,
    }
    if (copy := run.manifest.files.get(layout.COST_MODEL)) is not None:
        expected["cost model"] = file_sha256(planned.cost_file)
        sealed["cost model"] = copy.sha256
    changed = sorted([*changed, *(name for name in expected if expected[name] != sealed[name])])
    if changed:
        raise SpecError(
            f"was sealed with another {' and '.join(changed)} than the experiment file now asks for",
            where=str(run.path),
            hint="Give the changed experiment a new name, or write to another --runs folder",
        )
