"""No backend seals a condition that it did not apply: what nothing shows is refused, what differs is INVALID.

Every registered backend is held to it, also those that will be added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.cli.tree import app
from harness.errors import SpecError
from harness.kinds import KINDS
from harness.measure.records.store import RunStore
from harness.measure.server.life import LaunchPlan
from harness.measure.server.process import free_port
from harness.model.engine import EngineConfig
from harness.model.experiment import resolve
from harness.model.spec import ExperimentSpec, ServerSpec
from harness.model.spec.server import ENGINE_KEYS, HARNESS_KEYS, PAGED_KEYS
from harness.runner import StopFlag, run_experiment
from harness.runner.backends import backend_named
from harness.runner.backends.base import ServerBackend
from harness.runner.backends.emulator import EmulatorBackend
from harness.runner.experiment import refuse_unshown_settings
from harness.runner.progress import silent
from harness.runner.run import LaunchOptions, RunContext
from tests.support.experiments import SHORT_PROMPTS, one_condition
from tests.support.plain_server import PlainServer, plain_server
from tests.support.processes import serving

pytestmark = pytest.mark.same_everywhere

VALUES: Mapping[str, Any] = {
    "max_num_seqs": 8,
    "decode_buckets": [1, 8],
    "kv_slots": 12,
    "slot_tokens": 4096,
    "cost_model": "paper",
    "rules": "vendor-0.11.1",
    "block_size": 32,
    "num_speculative_tokens": 3,
    "speculative_method": "eagle3",
    "synthetic_acceptance_rates": [0.8, 0.6, 0.4],
    "speculative_model": "folder",
    "model": "folder",
    "step_log": "steps.jsonl",
    "artifact": "folder",
    "environment": "folder",
    "devices": [1],
    "patch": "none",
    "extra_args": ["--seed", "1"],
    "env": {"NAME": "value"},
    "url": "http://127.0.0.1:1",
    "ssh": "host",
}


DRAFTS: Mapping[str, Any] = {
    "rules": "vllm-paged",
    "num_speculative_tokens": 2,
    "speculative_method": "ngram",
    "synthetic_acceptance_rates": [0.5, 0.4, 0.3],
}
"""None of these says anything without the others."""


def experiment(backend: str, *conditions: Mapping[str, Any], **server: Any) -> ExperimentSpec:
    """Conditions "c0", "c1", ... of two short sessions; each changes these keys of the server."""
    changed = [{"name": f"c{place}", "server": changes} for place, changes in enumerate(conditions)]
    server = {"observer": False, **server}
    return one_condition(
        "settings", backend, server=server, condition=changed, workload={"prompt_tokens": SHORT_PROMPTS}
    )


SETTINGS = ServerSpec.model_fields.keys() - HARNESS_KEYS


def value_of(key: str) -> Any:
    """A value that is not the key's default; of a number or a switch it follows from the row."""
    if key in VALUES:
        return VALUES[key]
    row = ServerSpec.model_json_schema()["properties"][key]
    kind = next(each for each in row.get("anyOf", [row]) if each["type"] != "null")
    assert kind["type"] in {"boolean", "integer", "number"}, f"VALUES has no {key}, which is of type {kind['type']}"
    return not row["default"] if kind["type"] == "boolean" else (row["default"] or kind.get("minimum", 0)) + 1


@pytest.mark.parametrize("name", KINDS)
def test_a_condition_that_sets_what_a_backend_does_not_show_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_named(name)
    monkeypatch.setattr(type(backend), "in_force", lambda *_: {})
    for key in SETTINGS - backend.shown_keys:
        others = DRAFTS if key in DRAFTS.keys() - {"rules"} else {}
        spec = experiment(name, {}, {key: value_of(key)}, **others)
        with pytest.raises(SpecError, match=rf"condition c1: nothing shows {key} = .*server\.declared = true"):
            refuse_unshown_settings(resolve(spec))
        refuse_unshown_settings(resolve(experiment(name, {}, {key: value_of(key)}, declared=True, **others)))


A_SERVER_EACH, AS_SHOWN, DECLARE = "Start a server for each condition", "Write what the server shows", "server.declared"


@pytest.mark.parametrize(
    ("server", "conditions", "hints"),
    [
        # One server cannot have both lengths; with a server each, one of them was started otherwise.
        ({}, ({}, {"slot_tokens": 4096}), {A_SERVER_EACH}),
        ({}, ({"port": 0}, {"slot_tokens": 4096, "url": "other"}), {AS_SHOWN}),
        # Both conditions ask for what the server is not.
        ({"slot_tokens": 4096}, ({}, {"port": 0}), {AS_SHOWN}),
        # What nothing shows stays unshown on another server.
        ({}, ({}, {"max_num_seqs": 16}), {A_SERVER_EACH, DECLARE}),
        ({}, ({}, {"max_num_seqs": 16, "url": "other"}), {DECLARE}),
    ],
)
def test_a_server_for_each_condition_is_advised_only_where_that_helps(
    server: Mapping[str, Any], conditions: Sequence[Mapping[str, Any]], hints: set[str]
) -> None:
    with plain_server(PlainServer(max_model_len=8192)) as one, plain_server(PlainServer(max_model_len=8192)) as two:
        named = [{**changes, **({"url": two.url} if "url" in changes else {})} for changes in conditions]
        spec = experiment("attached", *named, url=one.url, **server)
        with pytest.raises(SpecError) as refused:
            refuse_unshown_settings(resolve(spec))
    words = str(refused.value.hint)
    assert {hint for hint in (A_SERVER_EACH, AS_SHOWN, DECLARE) if hint in words} == hints


@pytest.mark.parametrize("name", ["emulator", "sim", "twin", "rbln"])
@pytest.mark.parametrize(
    "key", ["num_gpu_blocks", "block_size", "max_num_batched_tokens", "long_prefill_tokens", "async_scheduling"]
)
def test_a_stack_without_paged_kv_memory_refuses_its_keys(name: str, key: str) -> None:
    with pytest.raises(SpecError, match=rf"server\.{key}: .* not have it\. Leave the key out"):
        backend_named(name).check_server(ServerSpec.model_validate({key: value_of(key)}))


@pytest.mark.live
@pytest.mark.parametrize("name", KINDS)
def test_a_condition_that_a_backend_did_not_apply_is_invalid(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, backend = experiment(name, {}, {"kv_slots": 12}), backend_named(name)
    _, run = resolve(spec)
    if isinstance(backend, ServerBackend):
        plan = EmulatorBackend.launch

        def another(_: ServerBackend, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
            del server
            return replace(plan(EmulatorBackend(), ServerSpec(), options), backend=name)

        monkeypatch.setattr(type(backend), "launch", another)
    else:
        config = EngineConfig.from_server(ServerSpec())
        monkeypatch.setattr(EngineConfig, "from_server", lambda _: config)
    sealed = backend.perform(run, RunContext(tmp_path, "", None, silent, StopFlag()))
    assert not sealed.is_valid
    assert "setting-differs: kv_slots: requested 12, in force 8" in sealed.invalid_reasons


def test_a_setting_that_a_run_does_not_show_after_all_makes_it_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.runner.backends.sim.settings_of", lambda *_: {"slot_tokens": 8192})
    outcome = run_experiment(experiment("sim", {}, {"kv_slots": 12}), runs_root=tmp_path)
    reasons = [run.invalid_reasons for run in outcome.runs]
    way_out = "setting-unshown: conditions differ in what nothing shows: kv_slots = "
    assert [[one.startswith(way_out) for one in each] for each in reasons] == [[True], [True]]


def test_the_simulator_shows_all_that_its_engine_works_by(tmp_path: Path) -> None:
    changes = {key: value_of(key) for key in ENGINE_KEYS - PAGED_KEYS} | {"max_active_seqs": None}
    (_, run) = run_experiment(experiment("sim", {}, changes), runs_root=tmp_path).runs
    assert run.is_valid, run.invalid_reasons
    assert set(run.manifest.effective["shown"]) == ENGINE_KEYS - PAGED_KEYS


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[int, str]]:
    """Emulators that somebody else has started, by their number of KV slots."""
    with ExitStack() as servers:
        urls: dict[int, str] = {}
        for slots in (8, 12):
            folder = tmp_path_factory.mktemp(f"emulator-{slots}")
            plan = EmulatorBackend().launch(
                ServerSpec(kv_slots=slots), LaunchOptions(free_port(), folder, time_scale=10.0)
            )
            servers.enter_context(serving(plan, folder))
            urls[slots] = f"http://{plan.host}:{plan.port}"
        yield urls


@pytest.mark.live
def test_attached_servers_are_held_to_the_settings_of_their_conditions(
    tmp_path: Path, by_hand: Mapping[int, str]
) -> None:
    one_server = experiment("attached", {}, {"kv_slots": 12}, url=by_hand[8])
    with pytest.raises(SpecError, match=r"condition c1: kv_slots: requested 12, in force 8\. Start a server for each"):
        run_experiment(one_server, runs_root=tmp_path / "runs")
    assert list(RunStore(tmp_path / "runs").sealed("settings")) == []
    one_each = experiment("attached", {"url": by_hand[8]}, {"kv_slots": 12, "url": by_hand[12]})
    runs = run_experiment(one_each, runs_root=tmp_path / "runs").runs
    assert [run.invalid_reasons for run in runs] == [(), ()]
    assert [run.manifest.effective["server"]["kv_slots"] for run in runs] == [8, 12]


@pytest.mark.live
def test_what_nothing_shows_can_be_declared_and_is_called_so_wherever_its_figures_stand(
    tmp_path: Path, by_hand: Mapping[int, str]
) -> None:
    conditions = ({"url": by_hand[8]}, {"url": by_hand[12], "kv_slots": 12, "extra_args": ["--seed", "1"]})
    with pytest.raises(SpecError, match=r"condition c1: nothing shows extra_args = \['--seed', '1'\]"):
        run_experiment(experiment("attached", *conditions), runs_root=tmp_path)
    run_experiment(experiment("attached", *conditions, declared=True), runs_root=tmp_path)
    note = "Declared, not verified: c0 (extra_args = []); c1 (extra_args = ['--seed', '1'])."

    def harness(*words: str) -> str:
        done = CliRunner().invoke(app, [*words], env={"COLUMNS": "1000"})
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    where = ("settings", "--runs", str(tmp_path))
    for form in ("text", "markdown", "csv", "json"):
        assert note in harness("table", *where, "--format", form)
    assert note in harness("paper", "analyse", *where)
    assert note in harness("compare", str(tmp_path / "settings"))
    harness("report", *where, "-o", str(tmp_path / "page.html"))
    assert note.replace("'", "&#39;") in (tmp_path / "page.html").read_text()
    for run in RunStore(tmp_path).sealed("settings"):
        (found,) = [one for one in run.manifest.findings if one.code == "setting-declared"]
        assert found.evidence.startswith("declared, not verified: extra_args = ")
