"""A first experiment is written without a question asked, and passes the check that comes before every run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from harness.cli.tree import app
from harness.errors import SpecError
from harness.extras.twin.environment import TwinEnvironment
from harness.kinds import KINDS
from harness.measure.emulator.config import config_from_arguments
from harness.measure.emulator.metrics import ServerMetrics
from harness.measure.server.process import free_port
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.engine.paged import scheduler_of
from harness.model.experiment import resolve
from harness.model.spec import ExperimentSpec, ServerSpec, WorkloadSpec, load_experiment, load_toml
from harness.model.traces.recording import load_trace
from harness.runner.backends.emulator import EmulatorBackend
from harness.runner.run import LaunchOptions
from harness.stacks.rbln.rules.kv_rules import AUTO, RULE_SETS, is_paged
from tests.extras.formats.test_mooncake import sharing
from tests.support.plain_server import PlainServer, plain_server
from tests.support.processes import NO_PORT, serving
from tests.support.stacks import write_artifact, write_driver, write_environment, write_patched_stack
from tests.support.trace_rows import assistant, result, text, tool, user

pytestmark = pytest.mark.same_everywhere


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "mine"


def harness(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exception is None, (done.exception, done.output)
    return done.output


def begun(*words: str) -> ExperimentSpec:
    """The experiment that ``harness init`` writes, which it checked."""
    harness("init", "mine", *words)
    return load_experiment("mine.toml")


def begun_and_checked(*words: str) -> ExperimentSpec:
    """The same, where ``--dry-run`` accepts it too."""
    spec = begun(*words)
    assert "replay" in harness("run", "mine.toml", "--dry-run")
    return spec


@pytest.mark.parametrize("backend", ["", "emulator", "sim"])
def test_a_first_experiment_of_a_modelled_server_compares_eight_slots_with_twelve(backend: str) -> None:
    spec = begun_and_checked(*(("--backend", backend) if backend else ()))
    assert spec.backend == (backend or "emulator")
    assert [spec.server_of(condition).num_kv_slots for condition in spec.condition] == [8, 12]
    assert "twelve KV slots" in spec.question


def test_a_first_experiment_of_the_twin_passes_its_check(twin: TwinEnvironment) -> None:
    del twin
    assert begun_and_checked("--backend", "twin").backend == "twin"


def test_a_first_experiment_on_an_npu_takes_the_model_that_is_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = write_patched_stack(folder.parent, monkeypatch)
    monkeypatch.setenv("HOME", str(folder.parent / "home"))
    driver = write_driver(folder.parent / "driver")
    monkeypatch.setenv("PATH", f"{stack / 'bin'}:{driver}:/usr/bin:/bin")
    write_artifact(folder / "artifacts" / "little", batch_size=6, decoder_batch_sizes=[6, 2, 1], kvcache_num_blocks=6)
    server = begun_and_checked("--backend", "rbln").server
    assert server.artifact == "artifacts/little"
    assert (server.max_num_seqs, server.decode_buckets, server.kv_slots) == (6, (1, 2, 6), 6)


@pytest.mark.parametrize("backend", KINDS)
def test_a_first_experiment_of_every_backend_says_what_comes_next_and_can_be_predicted(backend: str) -> None:
    printed = harness("init", "mine", "--backend", backend)
    assert load_toml(Path("mine.toml"))["replicates"] == 6
    assert "harness run mine.toml --runs runs/mine" in printed
    if backend in ("vllm", "attached", "rbln"):
        # Without a stack, a server or a compiled model the file is not complete.
        assert "# comes first" in printed
    assert ("harness simulate mine.toml" in printed) == (backend != "vllm")
    if backend == "vllm":
        # Its step times are known once it is calibrated.
        error = CliRunner().invoke(app, ["simulate", "mine.toml"]).exception
        assert isinstance(error, SpecError)
        assert "`harness server calibrate`" in str(error)
        return
    simulated = harness("simulate", "mine.toml", "--draws", "1")
    assert "no-waits" in simulated or "twelve-slots" in simulated


def test_a_first_experiment_of_vllm_passes_its_check_where_a_vllm_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = write_environment(folder.parent / "stack", versions={"vllm": "0.30.0"})
    monkeypatch.setenv("PATH", f"{stack / 'bin'}:/usr/bin:/bin")
    assert begun_and_checked("--backend", "vllm").server.model
    assert "comes first" not in harness("init", "other", "--backend", "vllm")


PAGED = "--rules vllm-paged --cost-model emulated-gpu"
SHAPES = [
    *(f"--rules {name}" for name in (AUTO, *RULE_SETS) if not is_paged(name)),
    "--decode-buckets 8 --kv-slots 2 --slot-tokens 256",
    "--max-num-seqs 1 --kv-slots 12",
    "--max-num-seqs 12 --slot-tokens 32768 --no-prefix-caching",
    "--max-num-seqs 64 --decode-buckets 1,64 --cost-model emulated-gpu",
    "--rules vendor-0.12.1 --max-num-active-seqs 3",
    PAGED,
    PAGED.replace("vllm-paged", "vllm-paged-0.30") + " --num-gpu-blocks 1024 --block-size 128",
    f"{PAGED} --max-num-seqs 12 --max-num-batched-tokens 512 --async-scheduling",
    f"{PAGED} --decode-buckets 1 --slot-tokens 256 --no-prefix-caching",
]


def shown_as(flags: str) -> tuple[ServerSpec, PlainServer]:
    """The server that ``harness server emulator`` starts with these flags, and one that shows what it would."""
    server = config_from_arguments(flags.split()).server
    engine = EngineConfig.from_server(server)
    num_blocks = scheduler_of(engine, load_cost_model(server.cost_model)).num_blocks + 1
    metrics = ServerMetrics("emulated", engine, num_blocks, server.cost_model).render(of_the_process=False)
    return server, PlainServer(
        gives_token_ids=True, has_metrics=True, metrics=metrics.decode(), max_model_len=server.slot_tokens
    )


@pytest.mark.parametrize("flags", SHAPES)
def test_the_file_for_a_server_keeps_all_that_the_server_shows(flags: str) -> None:
    server, shown = shown_as(flags)
    with plain_server(shown) as running:
        spec = begun("--for", running.url)
    paged = {"num_gpu_blocks": EngineConfig.from_server(server).num_blocks} if server.is_paged else {}
    wanted = EngineConfig.from_server(server.model_copy(update=paged))
    assert EngineConfig.from_server(spec.server) == wanted
    assert spec.server.cost_model == server.cost_model
    assert not spec.server.declared
    assert spec.condition[1].treatment == "no-waits", "a change that takes no other server"


@pytest.mark.parametrize(
    "flags", ["--slot-tokens 256", "--slot-tokens 512 --max-num-seqs 1", f"{PAGED} --slot-tokens 1024"]
)
def test_a_recording_is_made_to_fit_the_server(flags: str) -> None:
    _, shown = shown_as(flags)
    with plain_server(shown) as running:
        assert begun("--for", running.url, "--from", "coding-agent").workload.length_divisor > 1


@pytest.mark.live
def test_a_server_that_runs_is_asked_what_it_is(tmp_path: Path) -> None:
    shape = ServerSpec(max_num_seqs=6, decode_buckets=(1, 2, 6), kv_slots=9, slot_tokens=1024)
    plan = EmulatorBackend().launch(shape, LaunchOptions(free_port(), tmp_path, log_format="precise"))
    with serving(plan, tmp_path):
        spec = begun_and_checked("--for", f"http://{plan.host}:{plan.port}")
        recorded = harness("init", "recorded", "--for", f"http://{plan.host}:{plan.port}", "--from", "coding-agent")
        assert "no-waits/0" in harness("run", "recorded.toml", "--dry-run"), recorded
    assert (spec.backend, spec.workload.prompt_form, spec.limits.needs_metrics) == ("attached", "token-ids", True)
    assert spec.server.shape == shape.shape
    assert not spec.server.declared
    assert load_experiment("recorded.toml").workload.length_divisor > 1


@pytest.mark.live
def test_of_a_plain_server_what_it_does_not_show_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME_OF_A_KEY", "sk-secret")
    with plain_server(PlainServer(key="sk-secret")) as server:
        spec = begun_and_checked("--for", server.url, "--api-key-env", "NAME_OF_A_KEY")
        assert "serves plain" in Path("mine.toml").read_text()
    assert (spec.workload.prompt_form, spec.limits.needs_metrics) == ("text", False)
    assert (spec.server.declared, spec.server.api_key_env) == (True, "NAME_OF_A_KEY")


def test_two_servers_are_the_two_conditions_and_the_question_names_what_differs() -> None:
    (_, less), (_, more) = shown_as("--kv-slots 12 --slot-tokens 1024"), shown_as("--kv-slots 16 --slot-tokens 1024")
    with plain_server(less) as first, plain_server(more) as second:
        spec = begun_and_checked("--for", first.url, "--for", second.url)
    assert spec.question == (
        f"Do these agents cost less on {second.url} than on {first.url}? They differ in kv_slots (12 and 16)."
    )
    assert [spec.server_of(one).url for one in spec.condition] == [first.url, second.url]
    assert [spec.server_of(one).kv_slots for one in spec.condition] == [12, 16]
    assert spec.server.slot_tokens == 1024, "what both show is written once"
    assert [one.treatment for one in spec.condition] == ["as-drawn", "as-drawn"]
    assert [one.name for one in spec.condition] == [f"port-{url.rpartition(':')[2]}" for url in (first.url, second.url)]


def test_two_servers_of_two_kinds_get_prompts_that_both_take_and_what_one_hides_is_declared() -> None:
    _, shown = shown_as("--kv-slots 12")
    shown.model = "other"
    with plain_server(shown) as first, plain_server(PlainServer()) as second:
        spec = begun("--for", first.url, "--for", second.url, "--from", "coding-agent")
    assert "model (other and plain)" in spec.question
    assert "max_num_seqs (8 and not shown)" in spec.question
    assert (spec.workload.prompt_form, spec.limits.needs_metrics) == ("text", False)
    assert [spec.server_of(one).declared for one in spec.condition] == [False, True]
    assert spec.condition[0].workload == spec.condition[1].workload


@pytest.mark.parametrize("urls", [("http://a:1", "http://a:1/"), ("http://a:1", "http://b:1", "http://c:1")])
def test_neither_one_server_twice_nor_a_third_is_compared(urls: tuple[str, ...]) -> None:
    error = CliRunner().invoke(app, ["init", "mine", *(word for url in urls for word in ("--for", url))]).exception
    assert "takes one server, or two that differ" in str(error)


def test_where_no_server_answers_nothing_is_written(folder: Path) -> None:
    nobody = f"http://127.0.0.1:{NO_PORT}"
    done = CliRunner().invoke(app, ["init", "mine", "--for", nobody, "--wait", "0s"])
    assert "no server answers there" in str(done.exception)
    done = CliRunner().invoke(app, ["init", "mine", "--for", nobody, "--wait", "long"])
    assert "--wait: 'long' is no time" in str(done.exception)
    done = CliRunner().invoke(app, ["init", "mine", "--for", "http://127.0.0.1:1", "--backend", "sim"])
    assert "goes with backend attached, not with sim" in str(done.exception)
    assert list(folder.iterdir()) == []


def test_recorded_agents_are_imported_and_replayed_whole() -> None:
    usage = (40_000, 0, 0, 20)
    rows = [
        user(0),
        assistant("m1", 2, usage, text(), tool("t1")),
        result("t1", 5),
        assistant("m2", 6, (10, 0, 40_020, 20), text()),
    ]
    Path("session.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    workload = begun_and_checked("--from", "session.jsonl").workload
    assert (workload.source, workload.trace) == ("trace", "mine.jsonl")
    assert workload.length_divisor == 2, "40,050 tokens do not fit the longest slot"
    assert sum(len(one.requests) for one in load_trace("mine.jsonl").recordings) == 2


def test_what_recordings_do_not_say_is_given_as_to_an_import(folder: Path) -> None:
    (folder / "m.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sharing(64, 256, prompt=2048)))
    with pytest.raises(AssertionError, match="block names than their prompt has blocks of 512 tokens"):
        harness("init", "mine", "--from", "m.jsonl")
    assert not Path("mine.jsonl").exists()
    begun("--from", "m.jsonl", "--block-tokens", "64", "--time-unit", "s")
    trace = load_trace("mine.jsonl")
    assert trace.head.block_tokens == 64
    assert [one.start_ns for one in trace.recordings] == [0, 1_000_000_000_000], "1,000 s, not 1,000 ms"
    with pytest.raises(AssertionError, match="goes with --from"):
        harness("init", "other", "--block-tokens", "64")
    with pytest.raises(AssertionError, match="is a trace already"):
        harness("init", "other", "--from", "coding-agent", "--block-tokens", "64")


def test_one_recorded_session_becomes_so_many_agents_at_once() -> None:
    write_recordings("few.jsonl", 1)
    spec = begun("--from", "few.jsonl", "--agents", "12", "--backend", "sim")
    (base, _) = (runs[0] for runs in resolve(spec).by_condition.values())
    assert (spec.workload.agents, base.plan.num_sessions) == (12, 12)
    assert "recordings dealt to them: 1" in Path("mine.toml").read_text()
    assert "they share no tokens" in Path("mine.toml").read_text()
    with pytest.raises(AssertionError, match="goes with --from"):
        harness("init", "other", "--agents", "4")
    keys = {"source": "trace", "trace": "few.jsonl", "agents": 4}
    for beside in ({"num_sessions": 2}, {"concurrency": 2}, {"arrivals": "recorded"}):
        with pytest.raises(ValidationError, match="agents says how many run at once"):
            WorkloadSpec.model_validate(keys | beside)
    with pytest.raises(ValidationError, match="agents does not belong to source 'drawn'"):
        WorkloadSpec.model_validate({"agents": 4})


def test_requests_that_share_blocks_get_rules_that_reuse_them_and_a_stretch_of_their_hour() -> None:
    """360 production requests in an hour, all with one first block: an hour is too long for a run."""
    rows = [
        {
            "timestamp": 10_000 * place,
            "input_length": 2048,
            "output_length": 20,
            "hash_ids": [0, *range(4 * place + 1, 4 * place + 4)],
        }
        for place in range(360)
    ]
    Path("m.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    spec = begun("--from", "m.jsonl", "--backend", "sim")
    text = Path("mine.toml").read_text()
    assert (spec.server.rules, spec.server.cost_model) == ("vllm-paged", "emulated-gpu")
    assert "reuses blocks of other sessions: 25 % of the prompt tokens here" in text
    assert (spec.workload.stretch_s, spec.workload.num_sessions) == (300.0, 100_000)
    assert "of 3590 s, some 30 sessions; another stretch for each replicate" in text
    plans = [run.plan.sessions for run in resolve(spec).by_condition["base"]]
    assert plans[0] != plans[1]
    assert all(len(sessions) in (30, 31) for sessions in plans)


def test_arrivals_that_are_more_than_the_server_can_do_take_turns_in_their_order() -> None:
    rows = [{"timestamp": 50 * place, "input_length": 4000, "output_length": 40, "hash_ids": []} for place in range(30)]
    Path("m.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    workload = begun("--from", "m.jsonl", "--backend", "sim").workload
    assert workload.concurrency == 8
    assert "in the recorded order: as recorded they take this server" in Path("mine.toml").read_text()


def test_of_recordings_that_would_take_hours_some_are_drawn() -> None:
    write_recordings("many.jsonl", 40, prompt_tokens=4000, generate_tokens=4000)
    workload = begun("--from", "many.jsonl", "--backend", "sim").workload
    assert workload.concurrency == 8
    assert 8 < workload.num_sessions < 40
    assert "of 40, drawn for each replicate; all take some" in Path("mine.toml").read_text()


def test_slots_and_sizes_that_are_asked_for_are_the_change() -> None:
    spec = begun("--slots", "16", "--buckets", "1,2,4,6,8")
    changed = spec.server_of(spec.condition[1])
    assert (changed.num_kv_slots, changed.decode_buckets) == (16, (1, 2, 4, 6, 8))
    assert spec.condition[1].name == "16-slots-5-sizes"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--buckets", "1,two"), "no list of sizes"),
        (("--buckets", "1,2,4"), "decode_buckets"),
        (("--backend", "rbln", "--slots", "16"), "has no change of slots or sizes"),
        (("--slots", "8"), "the baseline has 8 KV slots already"),
        (("--buckets", "8,4,2,1"), "the baseline has the sizes"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused_and_nothing_is_written(words: tuple[str, ...], what: str) -> None:
    error = CliRunner().invoke(app, ["init", "mine", *words]).exception
    assert isinstance(error, SpecError)
    assert what in str(error)
    assert not Path("mine.toml").exists()


def write_recordings(path: str, recordings: int, *, prompt_tokens: int = 200, generate_tokens: int = 600) -> None:
    """A trace of recordings that all begin at once, with one request each and no wait."""
    head = {"format": "harness-trace/1", "name": "few", "source_format": "made", "arrivals": "together"}
    columns = ["base", "after", "wait_ns", "wait_kind", "prompt_tokens", "keep_tokens", "generate_tokens"]
    lines = [{**head, "block_tokens": 0, "dropped": {}, "broken": {}, "labels": [], "requests": columns}]
    once = [[-1, [], 0, 0, prompt_tokens, 0, generate_tokens]]
    lines += [{"recording": f"few-{place}", "start_ns": 0, "requests": once} for place in range(recordings)]
    Path(path).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


@pytest.mark.parametrize(("recordings", "fewer"), [(2, 1), (5, 2), (20, 4)])
def test_where_nobody_waits_fewer_agents_at_a_time_are_compared(recordings: int, fewer: int) -> None:
    write_recordings("few.jsonl", recordings)
    _, shown = shown_as("--max-num-seqs 4")
    with plain_server(shown) as running:
        spec = begun("--for", running.url, "--from", "few.jsonl")
    assert spec.condition[1].name == f"{fewer}-at-a-time"
    base, other = (runs[0] for runs in resolve(spec).by_condition.values())
    assert base.plan.sessions != other.plan.sessions
    assert base.plan.num_requests == other.plan.num_requests == recordings


def test_one_session_without_waits_has_nothing_to_be_compared_with_on_one_server() -> None:
    write_recordings("few.jsonl", 1)
    _, shown = shown_as("--decode-buckets 8")
    with plain_server(shown) as running:
        spec = begun_and_checked("--for", running.url, "--from", "few.jsonl")
    assert [condition.name for condition in spec.condition] == ["base"]
    assert spec.rules == ()


@pytest.mark.parametrize(
    # More recordings than agents at a time; lengths that must shrink, and that just need not.
    ("recordings", "tokens"),
    [(9, 4), (1, 40_000), (2, 31_000)],
)
def test_every_recording_gives_a_file_that_its_check_accepts(recordings: int, tokens: int) -> None:
    write_recordings("few.jsonl", recordings, prompt_tokens=tokens, generate_tokens=tokens // 4)
    spec = begun_and_checked("--backend", "sim", "--from", "few.jsonl")
    base, other = (spec.server_of(condition).shape for condition in spec.condition)
    assert base != other


def test_of_a_file_that_is_refused_no_trace_is_left(folder: Path) -> None:
    Path("session.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in (user(0), assistant("m1", 2, (900, 0, 0, 20), text())))
    )
    error = CliRunner().invoke(app, ["init", "mine", "--from", "session.jsonl", "--buckets", "1,2,4"]).exception
    assert "decode_buckets" in str(error)
    assert [path.name for path in folder.iterdir()] == ["session.jsonl"]


def test_recorded_agents_that_come_back_after_others_took_their_slots_get_slots(folder: Path) -> None:
    """The trace that is imported already is replayed where it lies."""
    said = harness("init", "mine", "--backend", "sim", "--from", "coding-agent")
    assert "KV slots in place of 8: predicted to save" in said
    spec = load_experiment("mine.toml")
    assert spec.server_of(spec.condition[1]).num_kv_slots > 8
    assert spec.workload.trace == "coding-agent"
    assert [path.name for path in folder.iterdir()] == ["mine.toml"]


def test_three_recorded_agents_that_never_come_back_get_the_size_of_three() -> None:
    write_recordings("few.jsonl", 3)
    assert "compile {3,8}: predicted to save" in harness("init", "few", "--from", "few.jsonl")
    spec = load_experiment("few.toml")
    assert spec.server_of(spec.condition[1]).decode_buckets == (3, 8)
