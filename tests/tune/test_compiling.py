"""What a candidate needs compiled is compiled, said first, kept whole, and gone on with after any interruption."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.errors import ServerError, SpecError
from harness.model.spec import ExperimentSpec, ServerSpec, parse_experiment
from harness.model.spec.base import tomllib
from harness.runner import ExperimentOutcome, run_experiment
from harness.runner.backends import backend_named
from harness.stacks.rbln.launch.compile import CompileSpec, compile_artifact, registered_artifact
from harness.tune import confirm
from harness.tune.explore import QUICK
from harness.tune.page import TuneResult
from harness.tune.path import Tune
from tests.support.command_line import harness
from tests.support.stacks import STACK, write_artifact, write_environment

# Stands in for optimum-rbln in an environment of its own: the shipped export script runs on it.
OPTIMUM = """
import json
import os
from pathlib import Path
from typing import Any

{write_artifact}


class RBLNAutoModelForCausalLM:
    @classmethod
    def from_pretrained(cls, model, export, rbln_config):
        made = cls()
        made.config = rbln_config
        return made

    def save_pretrained(self, folder):
        with open("calls", "a") as calls:
            calls.write("x")
        asked = self.config
        write_artifact(
            Path(folder),
            batch_size=asked["batch_size"],
            decoder_batch_sizes=asked["decoder_batch_sizes"],
            kvcache_num_blocks=asked["kvcache_num_blocks"],
        )
        trouble = Path("trouble.py")
        if trouble.is_file():
            print("compiling graph 3", flush=True)
            exec(trouble.read_text())
"""
TRANSFORMERS = """
class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, model):
        return cls()

    def save_pretrained(self, folder):
        pass
"""


TROUBLE = Path("trouble.py")
"""Code that the compiler runs when its model is written, before it ends."""
FOLDER = Path("runs/small-tune")
CALLS = Path("calls")
TODAY = Path("models/today")
REFUSES = "raise ValueError('kvcache_num_blocks 16 does not fit')"


def experiment(**changes: Any) -> ExperimentSpec:
    table = {
        "name": "small",
        "backend": "rbln",
        "base_seed": 771,
        "workload": {"num_sessions": 8, "wait_cap_s": 20.0},
        "server": {"artifact": str(TODAY), "environment": "stack", "cost_model": "paper"},
        "tune": {"may_change": ["kv_slots"], "budget": "2h"},
        "condition": [{"name": "base"}],
    }
    return parse_experiment(table | changes, where="test")


def tune(said: list[str], spec: ExperimentSpec | None = None, **given: Any) -> Tune:
    given = {"perform": perform, "effort": QUICK.divided(6), **given}
    return Tune(spec or experiment(), Path("runs"), say=said.append, **given)


def perform(spec: ExperimentSpec, folder: Path, until_ns: int, **options: Any) -> ExperimentOutcome:
    """In virtual time, where nothing is compiled: there is no device here."""
    assert until_ns > 0
    conditions = [
        one.model_copy(update={"server": {key: value for key, value in one.server.items() if key != "artifact"}})
        for one in spec.condition
    ]
    spec = spec.model_copy(update={"backend": "sim", "condition": tuple(conditions)})
    return run_experiment(spec, runs_root=folder, resume=True, **options)


def make_host() -> None:
    """In the working folder: a stack, a stand-in for its compiler, and the model that runs today."""
    site = write_environment(Path("stack"), versions=STACK | {"torch": "2.13.0", "transformers": "5.0.0"}) / "site"
    (site / "optimum").mkdir()
    (site / "optimum" / "rbln.py").write_text(OPTIMUM.format(write_artifact=inspect.getsource(write_artifact)))
    (site / "transformers.py").write_text(TRANSFORMERS)
    compiled().rename(TODAY)


def compiled(**changes: Any) -> Path:
    """A model that was compiled beside today's."""
    exporter = replace(backend_named("rbln").exporter(ServerSpec(environment="stack")), free_gib=0.001)
    return compile_artifact(CompileSpec(model="Qwen/Qwen3-4B", **changes), TODAY.parent, exporter).folder


def models() -> list[Path]:
    """What the tune has compiled."""
    return sorted(path for path in (FOLDER / "artifacts").iterdir() if path.is_dir())


def change_record(**changes: Any) -> None:
    path = TODAY / "harness-artifact.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class Refused(NamedTuple):
    """A host whose tune ended in a compile that failed."""

    folder: Path
    found: TuneResult
    said: list[str]


SIZES = ["--set", "decoder_batch_sizes=[1, 2, 4, 8]"]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refused]:
    folder = tmp_path_factory.mktemp("host")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(confirm, "MOST_BLOCKS", 4)
        patch.chdir(folder)
        make_host()
        TROUBLE.write_text(REFUSES)
        said: list[str] = []
        yield Refused(folder, tune(said).run(), said)


@pytest.fixture
def host(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That host, and the compiler mended."""
    shutil.copytree(refused.folder, tmp_path / "host")
    monkeypatch.chdir(tmp_path / "host")
    TROUBLE.unlink()
    return tmp_path / "host"


def test_a_compile_that_fails_is_one_line_and_what_was_measured_stays(refused: Refused) -> None:
    (line,) = [line for line in refused.said if "does not fit" in line]
    assert "best is not measured: " in line
    assert "best: {1,2,4,8}/8, 16 slots has to be compiled, about " in "".join(refused.said)
    log = re.search(r"\S+\.log", line)
    assert log
    assert "compiling graph 3\n" in Path(log[0]).read_text()
    assert line.endswith("of a model compiled elsewhere: --candidate best=FOLDER")
    assert refused.found.answer.state == "predicted"
    assert "the stack refuses to compile it: ValueError: kvcache_num_blocks 16" in refused.found.answer.why
    assert len(list((refused.folder / FOLDER / "small-diagnose").glob("*/*/manifest.json"))) == 3


def test_the_same_command_compiles_it_once_and_measures_it(host: Path) -> None:
    answer = tune([]).run().answer
    assert answer.state == "confirmed"
    assert answer.sentence.startswith("16 KV slots in place of 8: ")
    (model,) = models()
    assert registered_artifact(model, check_hashes=True).config.kvcache_num_blocks == 16
    server = tomllib.loads((FOLDER / "tuned.toml").read_text())["server"]
    assert (server["artifact"], server["kv_slots"]) == (str(host / model), 16)
    calls = CALLS.read_text()
    assert tune([]).run().answer == answer
    assert CALLS.read_text() == calls


def test_a_model_that_was_compiled_elsewhere_is_taken_in_its_place(host: Path) -> None:
    TROUBLE.write_text(REFUSES)
    elsewhere = write_artifact(host / "elsewhere", kvcache_num_blocks=16)
    assert tune([], candidates={"best": str(elsewhere)}).run().answer.state == "confirmed"
    assert tune([]).run().answer.artifact == str(elsewhere)


def test_a_model_that_is_not_as_asked_is_refused_before_anything_is_fixed(host: Path) -> None:
    other = write_artifact(host / "elsewhere", kvcache_num_blocks=12)
    with pytest.raises(
        SpecError, match=r"--candidate .*elsewhere.*: does not fit the experiment: kv_slots is 16, compiled 12"
    ):
        tune([], candidates={"best": str(other)}).run()
    assert not (FOLDER / "frozen.json").exists()
    with pytest.raises(SpecError, match=r"there is no candidate 'smallest'\. Use one of best"):
        tune([], candidates={"smallest": str(other)}).run()


@pytest.mark.usefixtures("host")
def test_a_tune_that_was_killed_while_it_compiled_goes_on_and_takes_no_half_model() -> None:
    TROUBLE.write_text("import signal\nos.kill(os.getppid(), signal.SIGKILL)\nsignal.pause()")
    child = os.fork()
    if not child:
        tune([]).run()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    half = [path for path in (FOLDER / "artifacts").iterdir() if path.name.endswith(".partial")]
    assert [(path / "rbln_config.json").is_file() for path in half] == [True]
    TROUBLE.unlink()
    assert tune([]).run().answer.state == "confirmed"
    assert not half[0].exists()
    assert registered_artifact(*models()).config.kvcache_num_blocks == 16


@pytest.mark.usefixtures("host")
def test_what_the_machine_lacked_is_tried_again_and_nothing_is_fixed_before() -> None:
    for trouble, words in (
        ("raise OSError(28, os.strerror(28))", r"the disk is full: OSError: \[Errno 28\]"),
        ("raise OSError(13, os.strerror(13))", r"a file cannot be used: PermissionError: \[Errno 13\]"),
        ("os.kill(os.getpid(), 9)", r"the compiler was ended by signal 9 \(Killed\): compiling graph 3"),
    ):
        TROUBLE.write_text(trouble)
        with pytest.raises(ServerError, match=words):
            tune([]).run()
        assert not (FOLDER / "tuned.toml").exists()
        assert not (FOLDER / "frozen.json").exists()


@pytest.mark.usefixtures("host")
def test_the_forecast_counts_a_compile_by_what_an_earlier_one_took() -> None:
    said: list[str] = []
    change_record(seconds=3000.0)
    tune(said).forecast()
    assert (
        "  compile: best: {1,2,4,8}/8, 16 slots has to be compiled, about 50 min by earlier compiles of this model"
        in said
    )
    short = experiment(tune={"may_change": ["kv_slots"], "budget": "50min"})
    with pytest.raises(SpecError, match=r"tune.budget: it leaves room for 0 plans of .* Allow \d+ min"):
        tune([], short).forecast()
    change_record(seconds=0)
    tune(said).forecast()
    assert any("a compile of this model was not timed here: minutes to hours" in line for line in said)


@pytest.mark.usefixtures("host")
def test_slots_that_a_model_beside_todays_has_take_no_compile() -> None:
    there = compiled(kvcache_num_blocks=24)
    calls, said = CALLS.read_text(), list[str]()
    assert tune(said).run().answer.artifact == str(there)
    assert f"  best: {{1,2,4,8}}/8, 16 slots is served by {there}" in said
    assert CALLS.read_text() == calls


@pytest.mark.usefixtures("host")
def test_a_model_of_which_nobody_knows_the_source_is_asked_for() -> None:
    (TODAY / "harness-artifact.json").unlink()
    said: list[str] = []
    answer = tune(said).run().answer
    assert answer.why == "compile these models, then give the same command with --candidate best=FOLDER"
    assert any("models/today: has no harness-artifact.json" in line for line in said)
    printed = next(line for line in said if "  best: " in line)
    command = printed.partition("best: ")[2]
    # Followed with a model that ships, up to the stack that is not there.
    words = [*shlex.split(command.replace("FILE", "qwen3-4b"))[1:], "--environment", "/nowhere"]
    assert "no vllm command in /nowhere" in harness(*words).stderr
    assert words[3:-2] == ["--set", "batch_size=8", *SIZES, "--set", "kvcache_num_blocks=16"]


def test_the_model_of_more_agents_is_compiled_too(host: Path) -> None:
    def diagnosed(spec: ExperimentSpec, folder: Path, until_ns: int, **options: Any) -> ExperimentOutcome:
        if "agents" in spec.name:
            raise ServerError("no device is here", where="today-11", hint="Measure on one")
        return perform(spec, folder, until_ns, **options)

    goal = {"may_change": ["kv_slots"], "goal": "sessions", "budget": "9h", "percentile": 80}
    spec = experiment(name="more", base_seed=7, slo={"ttft_ms": 2200.0}, tune=goal)
    said: list[str] = []
    with pytest.raises(ServerError, match="no device is here"):
        tune(said, spec, perform=diagnosed).run()
    assert any("predicted to hold 12 agents at a time" in line for line in said)
    confirm_1 = tomllib.loads((host / "runs/more-tune/agents-1.toml").read_text())
    (artifact,) = {each["server"]["artifact"] for each in confirm_1["condition"] if "proposed" in each["name"]}
    model = registered_artifact(Path(artifact))
    assert model.folder.is_relative_to(host / "runs/more-tune/artifacts")
    assert model.config.kvcache_num_blocks == 12
