"""Whether the observer fits a stack can be said from its source: the twin's real packages, and what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.extras.twin.environment import TwinEnvironment, known_stacks
from harness.stacks.rbln.launch.patches import HOOKS, OUTPUT_FIELDS, RUNTIME_HOOK, missing_hooks, verify_installed
from harness.stacks.vllm.step_log import INSIDE
from tests.support.command_line import harness
from tests.support.little_stack import write_little_stack
from tests.support.stacks import write_patched_stack


def _missing(root: Path) -> list[str]:
    def read(name: str) -> str | None:
        return (root / name).read_text() if (root / name).is_file() else None

    return missing_hooks(read, (*HOOKS, RUNTIME_HOOK))


@pytest.mark.parametrize("twin", [stack.version for stack in known_stacks()], indirect=True)
def test_the_real_packages_of_a_twin_have_every_hook(twin: TwinEnvironment) -> None:
    assert _missing(twin.site_packages) == []
    assert "the observer's 8 hooks fit" in verify_installed(twin.site_packages)


def test_a_stack_without_the_package_of_a_hook_is_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_patched_stack(tmp_path, monkeypatch)
    (root / "site" / "vllm_rbln" / "__init__.py").write_text("")
    done = harness("server", "patch", "verify", "--environment", str(root))
    assert done.returncode == 2
    assert "the observer does not fit: " in done.stderr
    assert "optimum/rbln/utils/runtime_utils.py is not there" in done.stderr
    assert "the patch: vllm_rbln-0.11.1/bucket_log agrees in all three hashes" in done.stderr


@pytest.mark.parametrize(
    ("renamed", "said"),
    [
        ("execute_model", "has no RBLNOptimumModelRunner.execute_model"),
        ("class RBLNPrefixKVCacheManager", "has no RBLNPrefixKVCacheManager.free_request"),
        ("_evict_block", "has no RBLNPrefixKVCacheManager._evict_block"),
        ("preprocess_for_decoder", "has no RBLNOptimumDecoderMixin.decode_layout or preprocess_for_decoder"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, renamed: str, said: str) -> None:
    assert any(said in one for one in _missing(write_little_stack(tmp_path, without=renamed)))


def test_a_tree_without_the_package_lacks_everything(tmp_path: Path) -> None:
    assert len(_missing(tmp_path)) == len(HOOKS) + 1


def test_every_function_that_the_observer_wraps_is_among_the_points() -> None:
    source = "".join((INSIDE / "vllm_step_log" / name).read_text() for name in ("core.py", "device.py"))
    for _path, owner, names in (*HOOKS, RUNTIME_HOOK):
        assert any(name in source for name in names)
        # vLLM itself asks for the class of the scheduler.
        assert owner in source or owner == "RBLNOptimumScheduler"
    assert all(name in source for name in OUTPUT_FIELDS)
