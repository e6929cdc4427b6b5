"""What a server is, is decided by what it shows, what its recording shows, or what the user says; never by a guess."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import cast

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from harness.cli.first_servers import experiment_on
from harness.cli.tree import app
from harness.errors import SpecError
from harness.kinds import ServingStack
from harness.model.spec import ServerSpec, load_experiment
from harness.stacks.vllm.step_log import RecordedServer
from tests.support.plain_server import PlainServer, plain_server
from tests.support.recorded_sessions import record

pytestmark = pytest.mark.same_everywhere


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def a_vllm(max_model_len: int = 8192, **labels: object) -> PlainServer:
    """A server whose metrics have these labels beside blocks of 128 tokens."""
    shown = {"block_size": 128, "enable_prefix_caching": True, **labels}
    text = ",".join(f'{name}="{value}"' for name, value in shown.items())
    metrics = f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{text}}} 1.0\n"
    return PlainServer(gives_token_ids=True, has_metrics=True, metrics=metrics, max_model_len=max_model_len)


def written(server: PlainServer, *options: str) -> tuple[ServerSpec, str]:
    """What ``init`` writes of it, and the file's text."""
    with plain_server(server) as running:
        done = CliRunner().invoke(app, ["init", "mine", "--for", running.url, *options])
    if done.exception is not None:
        raise done.exception
    return load_experiment("mine.toml").server, Path("mine.toml").read_text()


def recording(folder: Path, *, scheduler: str, **settings: object) -> str:
    """Recorded sessions of a server with this scheduler and these settings."""
    path = record(0, folder / "recorded").sessions
    first, *rest = path.read_text().splitlines()
    header = json.loads(first)
    header |= {"scheduler": scheduler, "effective": {**header["effective"], **settings}}
    path.write_text("\n".join([json.dumps(header), *rest]) + "\n")
    return str(path)


VLLM = "vllm.v1.core.sched.scheduler.Scheduler"


def test_where_nothing_tells_the_stacks_apart_the_user_says_it() -> None:
    silent = a_vllm(num_gpu_blocks=8192)
    with pytest.raises(SpecError, match="tells vLLM itself from vllm-rbln") as refused:
        written(silent)
    assert "--stack" in str(refused.value.hint)
    assert not Path("mine.toml").exists()
    server, _ = written(silent, "--stack", "vllm")
    assert (server.rules, server.num_gpu_blocks, server.block_size) == ("vllm-paged", 8192, 128)
    assert server.kv_slots is None


def test_a_server_that_shows_another_stack_than_the_user_says_is_refused_with_both() -> None:
    with pytest.raises(SpecError, match=r"is vLLM itself by its metrics.* and vllm-rbln by --stack"):
        written(a_vllm(num_gpu_blocks=64, block_size=16), "--stack", "rbln")


def test_the_settings_of_a_recording_are_those_of_its_server(folder: Path) -> None:
    path = recording(folder, scheduler=VLLM, max_num_seqs=6, num_gpu_blocks=8192, block_size=128, max_model_len=8192)
    server, text = written(a_vllm(num_gpu_blocks=4096), "--from", path)
    assert (server.rules, server.max_num_seqs, server.num_gpu_blocks) == ("vllm-paged", 6, 4096)
    assert "by its recording, not shown now" in text
    assert "when it was recorded: 8192" in text
    assert "assumed" not in text
    CliRunner().invoke(app, ["init", "started", "--backend", "vllm", "--from", path])
    started = load_experiment("started.toml").server
    assert (started.max_num_seqs, started.num_gpu_blocks, started.block_size) == (6, 8192, 128)
    assert not started.extra_args
    path = recording(folder, scheduler=VLLM, enforce_eager=True)
    CliRunner().invoke(app, ["init", "eager", "--backend", "vllm", "--from", path])
    assert load_experiment("eager.toml").server.extra_args == ("--enforce-eager",)


VALUES: dict[str, tuple[object, ...]] = {
    "num_gpu_blocks": (512, 4096, 8192),
    "block_size": (16, 32, 128),
    "prefix_caching": (True, False),
    "slot_tokens": (4096, 8192, 131_072),
}
LABELS = {"prefix_caching": "enable_prefix_caching"}


def test_each_drawn_difference_of_a_server_and_its_recording_is_named_with_both_values() -> None:
    drawn, server = random.Random(71), a_vllm()
    with plain_server(server) as running:
        for _ in range(40):
            recorded = {key: drawn.choice(values) for key, values in VALUES.items()}
            key = drawn.choice(list(VALUES))
            shown = {**recorded, key: drawn.choice([value for value in VALUES[key] if value != recorded[key]])}
            labels = {LABELS.get(name, name): shown[name] for name in VALUES if name != "slot_tokens"}
            again = a_vllm(cast("int", shown["slot_tokens"]), **labels)
            server.metrics, server.max_model_len = again.metrics, again.max_model_len
            server_then = RecordedServer("0.32.0", ServingStack.vllm, recorded, is_eager=False)
            found = experiment_on([running.url], "", 0.0, None, server_then)
            assert found.notes == (f"{running.url}: {key} = {recorded[key]} when it was recorded, {shown[key]} now",)
            named = [(line, comment) for line, comment in found.server if "when it was recorded" in comment]
            assert named == [
                (f"{key} = {json.dumps(shown[key])}", f"shown by the server; when it was recorded: {recorded[key]}")
            ]


@pytest.mark.parametrize("model", ["/models/served/", "org/served", "org/other"])
def test_a_recording_of_another_server_is_said_to_be_one(folder: Path, model: str) -> None:
    path = recording(folder, scheduler=VLLM, max_num_seqs=77, num_gpu_blocks=8192, model=model)
    server = a_vllm(num_gpu_blocks=4096)
    server.model = "org/served" if model.startswith("/") else "served"
    with plain_server(server) as running:
        done = CliRunner().invoke(app, ["init", "mine", "--for", running.url, "--from", path])
    said = " ".join(done.output.split())
    assert "num_gpu_blocks = 8192 when it was recorded, 4096 now" in said
    another = "the model was org/other when it was recorded, served now"
    assert (another in said, "the model was" in said) == ((True, True) if model == "org/other" else (False, False))
    # The steps beside it are another server's too: nothing is priced by them.
    (steps,) = folder.rglob("core.jsonl")
    timed = json.loads(steps.read_text().partition("\n")[0])["effective"]
    unlike = f"max_num_seqs = 77 and {timed['max_num_seqs']}; num_gpu_blocks = 8192 and {timed['num_gpu_blocks']}"
    assert f"the recorded steps do not tell its costs: sessions.jsonl and core.jsonl show {unlike}" in said
    assert "cost_model" not in Path("mine.toml").read_text()


def test_an_experiment_may_have_the_name_of_its_recording(folder: Path) -> None:
    Path("mine.jsonl").write_bytes(Path(recording(folder, scheduler=VLLM)).read_bytes())
    done = CliRunner().invoke(app, ["init", "mine", "--from", "mine.jsonl", "--until", "1000h"])
    assert done.exit_code == 0, done.output
    assert load_experiment("mine.toml").workload.trace == "mine-trace.jsonl"


def test_a_recording_of_another_stack_is_refused(folder: Path) -> None:
    path = recording(folder, scheduler="vllm_rbln.v1.core.optimum_scheduler.RBLNOptimumScheduler")
    with pytest.raises(SpecError, match="vllm-rbln by the recording"):
        written(a_vllm(num_gpu_blocks=64, block_size=16), "--from", path)


def test_short_blocks_tell_a_vllm_and_of_one_with_slots_their_number_is_kept() -> None:
    paged, _ = written(a_vllm(131_072, num_gpu_blocks=4096, block_size=16))
    assert (paged.rules, paged.num_gpu_blocks, paged.block_size, paged.slot_tokens) == ("vllm-paged", 4096, 16, 131_072)
    assert paged.declared, "its limit is not shown"
    Path("mine.toml").unlink()
    slots, _ = written(a_vllm(num_gpu_blocks=1538, kv_cache_size_tokens=98_432), "--stack", "rbln")
    assert (slots.kv_slots, slots.is_paged) == (12, False)


def test_a_modelled_kv_slot_of_that_length_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValidationError, match=r"slot_tokens 131,072 is more than the 32,768 .* up to 1,048,576"):
        ServerSpec(slot_tokens=131_072)
    assert ServerSpec(slot_tokens=1_048_576, rules="vllm-paged").is_paged
