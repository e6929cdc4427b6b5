"""Provenance says which code ran where, and nothing that is nobody's business."""

from __future__ import annotations

import json
import os
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from harness.measure.server import provenance


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e@example.org", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "module.py").write_text("answer = 42\n")
    git(tmp_path, "init", "--quiet", "--initial-branch", "trunk")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_everything_goes_into_json_and_back() -> None:
    facts = provenance.capture(["/home/somebody/.venv/bin/harness", "run", "demo.toml"])
    assert json.loads(json.dumps(facts)) == facts
    assert facts["argv"] == ["harness", "run", "demo.toml"]
    assert facts["packages"]["numpy"] == metadata.version("numpy")
    assert "vllm-of-nobody" not in provenance.package_versions(["vllm-of-nobody"])
    assert facts["clock"]["realtime_minus_monotonic_ns"] > 0
    assert facts["host"]["cpu_usable"] <= facts["host"]["cpu_count"]


def test_no_variable_of_the_environment_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hush-4711")
    assert "hush-4711" not in json.dumps(provenance.capture(["harness"]))


def test_a_clean_checkout_is_named_by_its_commit(checkout: Path) -> None:
    facts = provenance.source_facts(checkout)
    assert facts["git_commit"] == git(checkout, "rev-parse", "HEAD")
    assert facts["git_branch"] == "trunk"
    assert facts["git_is_dirty"] is False
    assert facts["git_changed"] == []


def test_a_changed_file_makes_the_checkout_dirty_and_changes_the_source_hash(checkout: Path) -> None:
    before = provenance.source_facts(checkout)
    (checkout / "harness" / "module.py").write_text("answer = 43\n")
    (checkout / "new.txt").write_text("new\n")
    after = provenance.source_facts(checkout)
    assert after["git_is_dirty"] is True
    assert after["git_changed"] == ["harness/module.py", "new.txt"]
    assert after["git_commit"] == before["git_commit"]
    assert after["sha256"] != before["sha256"]


def test_an_installed_copy_inside_another_repository_claims_no_commit(checkout: Path) -> None:
    installed = checkout / "site-packages"
    (installed / "harness").mkdir(parents=True)
    (installed / "harness" / "module.py").write_text("answer = 42\n")
    assert provenance.source_facts(installed) == {"sha256": provenance.source_facts(checkout)["sha256"]}


def test_renaming_a_file_changes_the_source_hash(checkout: Path) -> None:
    before = provenance.source_sha256(checkout / "harness")
    (checkout / "harness" / "module.py").rename(checkout / "harness" / "other.py")
    assert provenance.source_sha256(checkout / "harness") != before


def test_looking_at_a_checkout_takes_no_lock_of_it(checkout: Path) -> None:
    os.utime(checkout / "harness" / "module.py", (1, 1))
    index = checkout / ".git" / "index"
    before = index.read_bytes()
    provenance.source_facts(checkout)
    assert index.read_bytes() == before


def test_what_cannot_be_read_is_absent(tmp_path: Path) -> None:
    assert provenance.read_line(str(tmp_path / "missing")) is None
    (tmp_path / "harness").mkdir()
    assert set(provenance.source_facts(tmp_path)) == {"sha256"}
