"""``freeze``: write one file that fixes an experiment's plans, predictions, criteria, code and patches.

It refuses a tree with uncommitted changes (unless these are allowed), a file that exists, and a seed that was used
before: by a plan, experiment, search, calibration or frozen file below plans/, now or in any commit, or by a sealed run
or a search.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from harness.analysis.compare.stopping import check_can_decide
from harness.analysis.sessions import DEFAULT_COSTS
from harness.clock import utc_now
from harness.errors import SpecError, check_all
from harness.judge.catalogue import analysis_named
from harness.judge.prereg.frozen import (
    FrozenPerturbation,
    FrozenPlan,
    FrozenRule,
    NamedFile,
    Preregistration,
    replayed_by,
    rule_code,
)
from harness.judge.prereg.predict import FROZEN_DRAWS, predict_experiment
from harness.judge.prereg.repository import Commit, Repository, file_sha256
from harness.kinds import kind_named
from harness.measure.records import layout
from harness.measure.records.manifest import table_at
from harness.measure.server.provenance import SOURCE_ROOT, source_facts, source_sha256
from harness.model.experiment import PlannedRuns, resolve
from harness.model.plan.files import save_plan
from harness.model.sim.draws import perturbation_of
from harness.model.spec import ExperimentSpec, RulesName
from harness.model.spec.changes import recorded_changes
from harness.model.spec.experiment import DEFAULT_SEED
from harness.model.spec.rules import DecisionRule, find_rule, load_rule
from harness.outputs import one_at_a_time, write_atomic
from harness.shipped import find_shipped, shipped_names
from harness.stacks.rbln.launch.artifacts import artifact_identity, check_served
from harness.stacks.rbln.launch.patches import PATCH_ROOTS
from harness.stacks.rbln.rules.kv_rules import AUTO, rule_set

SEED = re.compile(r"""\b(?:\w*_)?seeds?"?\s*[=:]\s*(\[[\d,\s]*\]?|\d+)""")
PLANS = "plans"
HISTORY = (f"{PLANS}/*.toml", f"{PLANS}/*.json")
RULE_FILES = f"{PLANS}/rules/"
# The search space that `harness search` keeps beside its ledger.
SEARCH_FILE = "search.json"


class SeedUse(NamedTuple):
    """A seed, and the file or run that used it."""

    seed: int
    where: str


def used_seeds(
    repository: Repository, *, leave_out: Iterable[Path] = (), runs_root: Path | None = None
) -> list[SeedUse]:
    """Every use of a seed, without the files of ``leave_out``; also by the sealed runs below ``runs_root``."""
    hidden = {repository.relative(path) for path in leave_out}
    in_runs = () if runs_root is None else _in_runs(runs_root)
    return sorted({*_in_tree(repository, hidden), *_in_history(repository, hidden), *in_runs})


def _in_tree(repository: Repository, hidden: set[str]) -> Iterator[SeedUse]:
    folder = repository.root / PLANS
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        name = repository.relative(path)
        if name not in hidden and not name.startswith(RULE_FILES) and path.is_file():
            text = _text(path)
            yield from (SeedUse(seed, name) for seed in seeds_in(text))
            if path.suffix == ".toml" and "[[condition]]" in text and "base_seed" not in text:
                yield SeedUse(DEFAULT_SEED, name)


def _text(path: Path) -> str:
    """What a file says of seeds; of plans and ledgers, which may be long, what decides them: the first line."""
    with suppress(OSError), path.open("rb") as file:
        return (file.readline() if path.suffix == ".jsonl" else file.read()).decode("utf-8", "replace")
    return ""


def seeds_in(text: str) -> Iterator[int]:
    """Whole numbers after keys that are called seed, seeds or end in _seed or _seeds, in TOML or JSON."""
    return (int(number) for found in SEED.finditer(text) for number in re.findall(r"\d+", found[1]))


def _in_history(repository: Repository, hidden: set[str]) -> Iterator[SeedUse]:
    commit = path = ""
    for line in repository.history(*HISTORY).splitlines():
        if line.startswith("commit "):
            commit = line.split()[1][:12]
        elif line.startswith("+++ "):
            path = line.removeprefix("+++ ").removeprefix("b/")
        elif line.startswith("+") and path not in hidden and not path.startswith(RULE_FILES):
            yield from (SeedUse(seed, f"{path} in commit {commit}") for seed in seeds_in(line))


def _in_runs(runs_root: Path) -> Iterator[SeedUse]:
    """Exploratory sealed runs, calibrations among them, and searches below a folder, however deep they lie."""
    if not runs_root.is_dir():
        return
    for path in sorted(runs_root.rglob(SEARCH_FILE)):
        where = f"search {path.parent.relative_to(runs_root).as_posix()}"
        yield from (SeedUse(seed, where) for seed in seeds_in(_text(path)))
    for path in sorted(runs_root.rglob(layout.MANIFEST)):
        try:
            manifest = table_at(json.loads(path.read_bytes()))
        except (ValueError, OSError, RecursionError):
            # What cannot be read counts in no decision.
            continue
        seed = table_at(manifest, "requested", "experiment").get("base_seed")
        if isinstance(seed, int) and manifest.get("preregistration") is None:
            yield SeedUse(seed, f"exploratory run {path.parent.relative_to(runs_root).as_posix()}")


# The default folder of `harness run`: the seeds of exploratory runs below it count as used.
RUNS = "runs"
HARNESS_FOLDER = SOURCE_ROOT / "harness"
# Files that come with an installed harness and not from the repository.
SHIPPED = "shipped:"


@dataclass(frozen=True, slots=True)
class FreezeOptions:
    """folder: where the file goes; default plans/frozen of the repository. rules: added to those the experiment names.

    tag: a tag on the commit, only with ``is_committed``; is_signed: sign it.
    """

    folder: Path | None = None
    rules: tuple[str, ...] = ()
    prediction_rules: RulesName | None = None
    allows_dirty_tree: bool = False
    is_committed: bool = False
    tag: str = ""
    is_signed: bool = False


@dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen file. commit: None when the person still has to commit it."""

    path: Path
    preregistration: Preregistration
    commit: Commit | None


def freeze(
    spec: ExperimentSpec,
    experiment_file: Path,
    *,
    overrides: Sequence[str] = (),
    options: FreezeOptions | None = None,
    on_progress: Callable[[float], None] = lambda _share: None,
) -> Frozen:
    """Write the frozen file of an experiment; raises SpecError with the reason when that cannot be right.

    spec: the experiment as it will be run, with ``overrides`` applied to the content of ``experiment_file``. With a
    stopping rule, the rule and its whole budget are frozen. on_progress: receives the share of runs that are predicted.
    """
    if spec.stop is not None:
        check_can_decide(spec, spec.stop, str(experiment_file))
        spec = spec.until_decided()
    options = options or FreezeOptions()
    repository = Repository(experiment_file)
    # Not in the tree, where the lock would be an uncommitted change.
    with one_at_a_time(repository.git_folder, f"freeze-{spec.name}", f"freezing {spec.name}"):
        folder = options.folder or repository.root / "plans" / "frozen"
        path = folder / f"{spec.name}.json"
        dirty = repository.changes()
        _check_options(options, repository, dirty)
        _refuse(repository, spec, experiment_file, path)
        names = dict.fromkeys((*spec.rules, *options.rules))
        rules = [FrozenRule(file=named(repository, find_rule(name)), rule=load_rule(name)) for name in names]
        for frozen_rule in rules:
            if not frozen_rule.rule.has_subject_in(spec.factors):
                raise SpecError(
                    f"criterion {frozen_rule.rule.name!r} finds no condition of experiment {spec.name!r} to judge",
                    where=frozen_rule.file.path,
                    hint="Check which conditions the rule asks for",
                )
        _require_decision(spec, [each.rule for each in rules], experiment_file)
        planned = resolve(spec)
        _require_models(planned)
        prediction_rules = _prediction_rules(planned, options)
        # All that may refuse comes before the first file is written.
        files = tuple(named(repository, path) for path in sorted(set(_inputs(repository, planned))))
        # Of a server that somebody else started the usual costs are a guess.
        is_priced = all(
            kind_named(run.spec.backend).is_restarted or run.server.cost_model != DEFAULT_COSTS for run in planned
        )
        # As the experiment says, else enough for an interval that everybody will be held to.
        draws = spec.prediction.draws if "draws" in spec.prediction.model_fields_set else FROZEN_DRAWS
        predictions = predict_experiment(planned, prediction_rules or None, on_progress, draws) if is_priced else {}
        artifacts = _artifacts(planned)
        repository.relative(folder)
        plans, plan_paths = _save_plans(repository, planned, folder / spec.name)
        preregistration = Preregistration(
            name=spec.name,
            frozen_at_utc=utc_now().isoformat(timespec="seconds"),
            experiment_file=named(repository, experiment_file),
            overrides=recorded_changes(overrides),
            experiment=spec,
            plans=tuple(plans),
            replayed=replayed_by({name: [run.plan for run in runs] for name, runs in planned.by_condition.items()}),
            prediction_rules=prediction_rules,
            # By name, as the meaning of "auto" changes with every release.
            condition_rules={
                name: prediction_rules or runs[0].server.rule_set().name for name, runs in planned.by_condition.items()
            },
            perturbations=_perturbations(planned) if is_priced else {},
            predictions=predictions,
            rules=tuple(rules),
            code_sha256=source_sha256(HARNESS_FOLDER),
            code_commit=source_facts().get("git_commit") or "",
            rule_code=rule_code([each.rule for each in rules]),
            files=files,
            artifacts=artifacts,
            parent_commit=repository.resolved("HEAD^{commit}"),
            is_tree_dirty=bool(dirty),
            dirty_paths=tuple(dirty[:50]),
        ).sealed()
        write_atomic(path, [preregistration.to_json().encode()], what="the frozen file")
        if not options.is_committed:
            return Frozen(path, preregistration, None)
        commit = repository.commit((path, *plan_paths), f"Preregister {spec.name}: plans, predictions and criteria")
        if options.tag:
            repository.tag(options.tag, f"Preregistration of {spec.name}", is_signed=options.is_signed)
        return Frozen(path, preregistration, commit)


def _prediction_rules(planned: PlannedRuns, options: FreezeOptions) -> str:
    """The rules of all predictions, resolved where no condition names any; "" where each server has its own."""
    if options.prediction_rules:
        return rule_set(options.prediction_rules).name
    rules = {run.server.rule_set().name for run in planned}
    return rules.pop() if len(rules) == 1 and all(run.server.rules == AUTO for run in planned) else ""


def _perturbations(planned: PlannedRuns) -> dict[str, FrozenPerturbation]:
    """Perturbations of each condition's draws: an assumption that is not written down can be changed later."""
    first = {name: runs[0] for name, runs in planned.by_condition.items() if runs[0].spec.prediction.draws > 1}
    drawn = {name: perturbation_of(run.spec.prediction, run.cost_file) for name, run in first.items()}
    return {name: FrozenPerturbation(sizes=each.sizes, assumed=each.assumed) for name, each in drawn.items()}


def _refuse(repository: Repository, spec: ExperimentSpec, experiment_file: Path, path: Path) -> None:
    """SpecError, before anything is written, when this experiment cannot be frozen at ``path``."""
    repository.relative(path)
    analysis_named(spec.analysis, str(experiment_file))
    if path.exists():
        raise SpecError(
            "is frozen already, and a frozen file never changes",
            where=str(path),
            hint="To freeze a change of it, copy the experiment's file, give the copy another name = and base_seed, "
            "commit it and freeze the copy",
        )
    if spec.model_copy(update={"tune": None}) != ExperimentSpec.model_validate(spec.model_dump(mode="json")):
        raise SpecError(
            "server.env, extra_args or an address holds what may be a secret, which a frozen file cannot keep",
            where=str(experiment_file),
            hint='Write NAME = "redacted" in server.env and export NAME, or set it only in the environment',
        )
    how = f"Freeze it with a seed that nothing has used: harness prereg freeze {experiment_file} --commit --seed"
    check_new_seed(repository, spec, leave_out=[experiment_file], runs_root=repository.root / RUNS, how=how)


def _require_decision(spec: ExperimentSpec, rules: Sequence[DecisionRule], experiment_file: Path) -> None:
    """SpecError where nothing that is frozen could ever decide: no rule, or each needs more replicates."""
    if spec.stop is not None or any(rule.min_replicates <= spec.replicates for rule in rules):
        return
    name = experiment_file.name
    if rules:
        least = min(rule.min_replicates for rule in rules)
        what = f"its rules need {least} replicates to decide, and it has {spec.replicates}"
        raise SpecError(what, where=str(experiment_file), hint=f"How many it takes: harness power {name}")
    what = "names no decision rule, so its runs could decide nothing"
    if all(condition.name == spec.baseline_of(condition) for condition in spec.condition):
        hint = "Add a second [[condition]] to compare with, and a rule"
        raise SpecError(what, where=str(experiment_file), hint=hint)
    shipped = {name: load_rule(name) for name in shipped_names("rules")}
    fitting = [
        name
        for name, rule in shipped.items()
        if rule.has_subject_in(spec.factors)
        and not rule.missing_from(spec.factors)
        and rule.min_replicates <= spec.replicates
    ]
    hint = "Write more replicates: each shipped rule needs at least 3"
    if fitting:
        hint = f'Name one: rules = ["NAME"] in the file, or --rule NAME. Shipped rules that fit: {", ".join(fitting)}'
    raise SpecError(what, where=str(experiment_file), hint=hint)


def _require_models(planned: PlannedRuns) -> None:
    """SpecError for compiled models that are not here as the conditions name them: such a freeze could never be run."""
    kind = kind_named(planned.spec.backend)
    servers = [runs[0].server for runs in planned.by_condition.values()]
    named = [server for server in servers if not server.ssh and (server.artifact or kind.has_device)]
    if kind.has_stack:
        check_all(*(partial(check_served, server) for server in named), where=f"experiment {planned.spec.name!r}")


def _check_options(options: FreezeOptions, repository: Repository, dirty: Sequence[str]) -> None:
    if dirty and not options.allows_dirty_tree:
        are_runs = any(path.startswith(f"{RUNS}/") for path in dirty)
        raise SpecError(
            f"the tree has uncommitted changes ({len(dirty)}), first {dirty[0]}",
            where=str(repository.root),
            hint=f"{f'Write {RUNS}/ into .gitignore and commit the rest' if are_runs else 'Commit them'}, or pass "
            "--allow-dirty, which is recorded",
        )
    if options.is_signed and not options.tag:
        raise SpecError("only a tag can be signed", where="--sign", hint="Name it: --tag NAME")
    if options.tag and not options.is_committed:
        raise SpecError("a tag needs the commit it is put on", where="--tag", hint="Add --commit")
    if options.tag:
        repository.check_tag(options.tag, is_signed=options.is_signed)


def check_new_seed(
    repository: Repository, spec: ExperimentSpec, *, leave_out: Sequence[Path], runs_root: Path | None = None, how: str
) -> None:
    """Refuse a base seed that is left out, or that a file of the repository or a sealed run used before.

    leave_out: the file that the seed stands in, and others that may name it. how: what to do, before the number of an
    unused seed.
    """
    seed = spec.base_seed
    used = used_seeds(repository, leave_out=leave_out, runs_root=runs_root)
    uses = [use for use in used if use.seed == seed]
    if "base_seed" not in spec.model_fields_set:
        why = f"base_seed is left out, and its default ({DEFAULT_SEED}) is that of every experiment"
    elif uses:
        more = f" (and {len(uses) - 1} more)" if len(uses) > 1 else ""
        why = f"base seed {seed} was used before, by {uses[0].where}{more}"
    else:
        return
    taken = {use.seed for use in used}
    unused = next(number for number in count(seed + 1) if number not in taken)
    what = f"{why}: a confirmatory plan needs new inputs"
    raise SpecError(what, where=str(leave_out[0]), hint=f"{how} {unused}")


def named(repository: Repository, path: Path) -> NamedFile:
    """A file by its path from the repository's root, or from the harness's root for a shipped file."""
    absolute = path.resolve()
    for root, prefix in ((repository.root.resolve(), ""), (SOURCE_ROOT, SHIPPED)):
        if absolute.is_relative_to(root):
            return NamedFile(path=prefix + absolute.relative_to(root).as_posix(), sha256=file_sha256(path))
    raise SpecError(f"lies outside the repository {repository.root}", where=str(path), hint="Move it inside")


def located(repository: Repository, file: NamedFile) -> Path:
    """Where a named file lies now."""
    if file.path.startswith(SHIPPED):
        return SOURCE_ROOT / file.path.removeprefix(SHIPPED)
    return repository.root / file.path


def _save_plans(repository: Repository, planned: PlannedRuns, folder: Path) -> tuple[list[FrozenPlan], list[Path]]:
    plans: list[FrozenPlan] = []
    paths: dict[str, Path] = {}
    for run in chain.from_iterable(planned.by_condition.values()):
        if run.plan.hash not in paths:
            paths[run.plan.hash] = save_plan(run.plan, folder)
        plans.append(
            FrozenPlan(
                condition=run.condition.name,
                replicate=run.replicate,
                hash=run.plan.hash,
                drawn_hash=run.plan.drawn_hash,
                path=repository.relative(paths[run.plan.hash]),
            )
        )
    return plans, list(paths.values())


def _inputs(repository: Repository, planned: PlannedRuns) -> Iterator[Path]:
    """Files that plans, predictions or the server rest on."""
    spec = planned.spec
    yield from {run.cost_file for run in planned}
    for condition in spec.condition:
        yield find_shipped("waits", spec.workload_of(condition).waits, what="wait distribution")
    for patches in (repository.root / "patches", *PATCH_ROOTS):
        if patches.is_dir():
            yield from (path for path in patches.rglob("*") if path.is_file() and path.suffix != ".pyc")


def _artifacts(planned: PlannedRuns) -> dict[str, str]:
    """Compiled artifacts of the conditions that lie on this machine, by folder."""
    folders = {run.server.artifact for run in planned} - {""}
    hashes = {folder: artifact_sha256(folder) for folder in sorted(folders)}
    return {folder: sha256 for folder, sha256 in hashes.items() if sha256 is not None}


def artifact_sha256(folder: str) -> str | None:
    """Hash that identifies a compiled artifact; None when it is not on this machine."""
    path = Path(folder)
    return str(artifact_identity(path)["sha256_edges"]) if path.is_dir() else None
