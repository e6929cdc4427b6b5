"""Installing refuses what cannot work before it downloads anything; artifacts refuse what the stack would fail on."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import ExitCode, HarnessError, ServerError, SpecError
from harness.extras.twin.backend import cached_artifact, copy_artifact, twin_spec
from harness.extras.twin.environment import (
    COMMON_LOCK,
    STAMP_FILE,
    TwinEnvironment,
    find_twin,
    installed_twins,
    known_stacks,
    newest_stable,
    twin_variables,
)
from harness.extras.twin.install import (
    TwinInstallError,
    check_disk,
    check_released_files,
    choose_python,
    install_twin,
)
from harness.stacks.rbln.launch.serving import logging_config
from harness.uv import UV_LOCK

NOWHERE = (
    ("PIP_CONFIG_FILE", os.devnull),
    ("PIP_INDEX_URL", "http://127.0.0.1:9/simple"),
    ("PIP_EXTRA_INDEX_URL", ""),
    ("PIP_FIND_LINKS", ""),
)
"""pip's configuration on a machine without a network."""
INTERRUPTIBLE = "import signal, harness.cli as c; signal.signal(signal.SIGINT, signal.default_int_handler); c.main()"


def test_no_lock_names_a_package_index() -> None:
    for lock in (COMMON_LOCK, UV_LOCK, *(stack.lock for stack in known_stacks())):
        text = lock.read_text(encoding="utf-8")
        assert "://" not in text
        assert "--hash=sha256:" in text


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")

    with pytest.raises(SpecError, match="not a twin environment"):
        install_twin(tmp_path, on_progress=lambda _: None)

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_python_without_a_cpu_build_of_torch_is_named_with_the_way_out() -> None:
    with pytest.raises(TwinInstallError, match=r"pip finds no torch.*--torch-wheel"):
        choose_python(sys.executable, ["torch==0.0.1", "--no-index"], on_progress=lambda _: None)


def test_no_network_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (*NOWHERE, ("PIP_RETRIES", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(TwinInstallError, match=r"pip cannot reach its index\. Check the network"):
        choose_python(sys.executable, ["torch==2.13.0"], on_progress=lambda _: None)


def test_an_interrupted_installation_says_how_to_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTIBLE, "server", "twin", "install", "--path", str(tmp_path / "twin")]
    # pip waits for an index that is not there until it is interrupted.
    env = {**os.environ, **dict(NOWHERE), "PIP_RETRIES": "50", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        announced = [process.stdout.readline(), process.stdout.readline()]
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
    assert "to download at most" in announced[1]
    assert "interrupted: what is done stays, the same command continues" in rest
    assert process.returncode == ExitCode.INTERRUPTED


def test_an_interpreter_that_does_not_run_is_named() -> None:
    with pytest.raises(TwinInstallError, match="/no/python: does not run"):
        choose_python("/no/python", [], on_progress=lambda _: None)


def test_too_little_disk_is_refused_with_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(
        TwinInstallError, match=r"MiB free on this disk, the twin needs 1,000,000,000\. Free .* MiB, or choose"
    ):
        check_disk(tmp_path / "not" / "there", 1_000_000_000)


def test_a_half_installed_twin_is_not_found(tmp_path: Path) -> None:
    (tmp_path / STAMP_FILE).write_text(json.dumps({"torch": "2.13.0"}))

    with pytest.raises(HarnessError, match=r"no installed twin\. Run harness server twin install"):
        find_twin(tmp_path)


def test_each_release_keeps_to_itself_what_its_vllm_learned_of_models(tmp_path: Path) -> None:
    twins = [TwinEnvironment(tmp_path / version, {}) for version in ("0.11.1", "0.12.0")]

    assert len({twin_variables(twin)["VLLM_CACHE_ROOT"] for twin in twins}) == len(twins)


def test_installing_again_does_nothing(twin: TwinEnvironment) -> None:
    messages: list[str] = []

    assert install_twin(twin.folder, version=twin.version, on_progress=messages.append).stamp == twin.stamp

    assert messages == [f"{twin.folder}: already installed"]


def test_the_installed_stack_is_the_released_one(twin: TwinEnvironment) -> None:
    assert check_released_files(twin) > 3000


def test_a_file_of_the_stack_that_is_not_the_released_one_is_named(tmp_path: Path) -> None:
    twin = TwinEnvironment(tmp_path, {})
    site = tmp_path / "lib/python3.11/site-packages"
    (site / "vllm_rbln").mkdir(parents=True)
    (site / "vllm_rbln-1.0.dist-info").mkdir()
    module = site / "vllm_rbln/__init__.py"
    module.write_text("released")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"released").digest()).decode().rstrip("=")
    record = f"vllm_rbln/__init__.py,sha256={digest},8\nRECORD,,\n"
    (site / "vllm_rbln-1.0.dist-info/RECORD").write_text(record)
    assert check_released_files(twin) == 1
    module.write_text("changed")
    with pytest.raises(ServerError, match=r"__init__\.py is not the released file"):
        check_released_files(twin)
    module.unlink()
    with pytest.raises(ServerError, match="cannot be read"):
        check_released_files(twin)


def test_an_unknown_version_is_refused_with_the_known_versions(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"9\.9\.9: is not a version with a lock file in this release\. Choose 0\.11\.1, "
    ):
        install_twin(tmp_path, version="9.9.9", on_progress=lambda _: None)


def test_stacks_are_known_in_the_order_of_their_releases_and_a_preview_is_never_the_default() -> None:
    assert [stack.version for stack in known_stacks()] == ["0.11.1", "0.11.2", "0.12.0", "0.12.1a8"]
    assert newest_stable() == "0.12.0"
    assert {stack.version: stack.vllm for stack in known_stacks()}["0.12.0"] == "0.30.0"


def _pretend_twin(folder: Path, version: str) -> None:
    folder.mkdir()
    (folder / STAMP_FILE).write_text(json.dumps({"complete": True, "versions": {"vllm-rbln": version}}))


def test_the_newest_stable_twin_is_found_and_any_other_by_its_version_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.extras.twin.environment.twin_root", lambda: tmp_path)
    # As the harness named it before several could be had.
    _pretend_twin(tmp_path / ".venv-twin", "0.11.1")
    _pretend_twin(tmp_path / ".venv-twin-0.12.1a8", "0.12.1a8")
    assert find_twin().version == "0.11.1"
    _pretend_twin(tmp_path / ".venv-twin-0.12.0", "0.12.0")

    assert [twin.version for twin in installed_twins()] == ["0.11.1", "0.12.0", "0.12.1a8"]
    assert find_twin().version == "0.12.0"
    assert find_twin("0.12.1a8").folder == tmp_path / ".venv-twin-0.12.1a8"
    assert find_twin(str(tmp_path / ".venv-twin")).version == "0.11.1"
    with pytest.raises(
        HarnessError, match=r"no installed twin of 0\.11\.2\. Run harness server twin install --stack 0\.11\.2"
    ):
        find_twin("0.11.2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_batch_sizes": (4,)}, "single bucket 4 is not batch_size 8"),
        ({"decoder_batch_sizes": (8, 16)}, "bucket 16 is above batch_size 8"),
        ({"decoder_batch_sizes": ()}, "must be distinct and positive"),
        ({"decoder_batch_sizes": (1, 1, 8)}, "must be distinct and positive"),
        ({"num_devices": 0}, "num_devices"),
        ({"partition_tokens": 8192}, "do not divide max_seq_len 8192 in two or more parts"),
        ({"partition_tokens": 1000}, "partition_tokens"),
        ({"kvcache_num_blocks": 1}, "kvcache_num_blocks"),
        ({"max_seq_len": 1000}, "max_seq_len"),
        ({"max_seq_len": 40_960}, "above the 32768 tokens of eager attention"),
    ],
)
def test_an_artifact_that_the_stack_would_fail_on_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        twin_spec(**change)


def test_an_artifact_is_what_the_vendors_own_exporter_would_describe(twin: TwinEnvironment) -> None:
    folder = cached_artifact(twin, twin_spec())

    config = json.loads((folder / "rbln_config.json").read_text())

    assert config["cls_name"] == "RBLNQwen3ForCausalLMConfig"
    assert config["optimum_rbln_version"] == twin.stamp["versions"]["optimum-rbln"]
    assert (config["batch_size"], config["kvcache_num_blocks"], config["kvcache_block_size"]) == (8, 8, 8192)
    assert config["decoder_batch_sizes"] == [8, 4, 2, 1]
    assert {cfg["num_devices"] for cfg in config["_compile_cfgs"]} == {4}
    names = {path.name for path in folder.glob("*.rbln")}
    assert names == {"prefill.rbln", *(f"decoder_batch_{size}.rbln" for size in (1, 2, 4, 8))}


def test_equal_specifications_share_an_artifact_and_others_do_not(twin: TwinEnvironment) -> None:
    first, again = cached_artifact(twin, twin_spec()), cached_artifact(twin, twin_spec())

    assert first == again
    assert cached_artifact(twin, twin_spec(kvcache_num_blocks=9)) != first


def test_an_artifact_never_replaces_something_else(twin: TwinEnvironment, tmp_path: Path) -> None:
    copied = copy_artifact(twin, twin_spec(), tmp_path / "artifact")
    assert copy_artifact(twin, twin_spec(), copied) == copied
    (tmp_path / "weights.bin").write_bytes(b"precious")

    with pytest.raises(SpecError, match="holds other files"):
        copy_artifact(twin, twin_spec(), tmp_path)

    assert (tmp_path / "weights.bin").exists()


def test_the_log_format_keeps_both_trees_and_raises_only_what_is_read() -> None:
    loggers = logging_config()["loggers"]

    assert {name for name, logger in loggers.items() if logger["level"] == "INFO"} == {"vllm", "vllm_rbln"}
    assert all(name.startswith("vllm_rbln.") for name, logger in loggers.items() if logger["level"] == "DEBUG")
