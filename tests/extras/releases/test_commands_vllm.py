"""The alarm for vLLM itself: which known release it decides like, or which function differs."""

from __future__ import annotations

import json
from pathlib import Path

from release_wheels import stack, wheel
from typer.testing import CliRunner

from harness.cli.tree import app
from harness.stacks.rbln.launch.releases import load_table

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
SOURCE = """
class Scheduler:
    def schedule(self):
        request = self.running[0]
        return min(request.num_tokens, self.budget)
"""
FACTS = {
    "package": "vllm",
    "releases": {},
    "facts": [
        {
            "name": "order",
            "file": SCHEDULER,
            "functions": ["Scheduler.schedule"],
            "affects": ["rules"],
            "says": "the oldest",
        }
    ],
}
runner = CliRunner()


def vllm(folder: Path, version: str, source: str = SOURCE) -> str:
    return str(wheel(folder, version, {SCHEDULER: source}, package="vllm"))


def table(folder: Path) -> str:
    path = folder / "vllm-facts.json"
    path.write_text(json.dumps(FACTS))
    return str(path)


def test_a_vllm_that_decides_as_a_recorded_release_has_its_rules(tmp_path: Path) -> None:
    facts = table(tmp_path)
    done = runner.invoke(app, ["stack", "record", vllm(tmp_path, "0.33.0"), "--table", facts])
    assert (done.exit_code, "vLLM 0.33.0, 1 facts" in done.stdout) == (0, True)
    done = runner.invoke(app, ["stack", "check", vllm(tmp_path, "0.34.0"), "--table", facts])
    assert done.exit_code == 0, done.output
    assert "vLLM 0.34.0: 1 of 1 facts as in 0.33.0" in done.stdout
    assert "rules: yes (vllm-paged: 1 facts as in 0.33.0)" in done.stdout


def test_a_vllm_whose_scheduler_changed_is_called_with_the_function_and_its_lines(tmp_path: Path) -> None:
    facts = table(tmp_path)
    runner.invoke(app, ["stack", "record", vllm(tmp_path, "0.33.0"), "--table", facts])
    changed = vllm(tmp_path, "0.34.0", SOURCE.replace("running[0]", "running[-1]"))
    done = runner.invoke(app, ["stack", "check", changed, "--table", facts])
    assert done.exit_code == 3
    assert "changed: order (rules)" in done.stdout
    assert "- request = self.running[0]" in done.stdout
    assert "+ request = self.running[-1]" in done.stdout
    assert "rules: unknown (read and drive them first" in done.stdout
    said = json.loads(runner.invoke(app, ["stack", "check", changed, "--table", facts, "--format", "json"]).stdout)
    assert (said["package"], said["release"], said["rules"], said["holds"]) == ("vllm", "0.34.0", None, False)


def test_another_vllm_beside_it_and_the_table_of_the_other_package_are_refused(tmp_path: Path) -> None:
    release, facts = vllm(tmp_path, "0.33.0"), table(tmp_path)
    done = runner.invoke(app, ["stack", "check", release, "--vllm", release])
    assert "has no other vLLM beside it" in str(done.exception)
    done = runner.invoke(app, ["stack", "check", str(stack(tmp_path, "0.12.0")), "--table", facts])
    assert "holds facts of vllm, and the release is a vllm_rbln" in str(done.exception)


def test_the_shipped_table_holds_four_releases_and_tells_the_padding_and_the_scheduler_apart() -> None:
    _path, shipped = load_table(package="vllm")
    assert list(shipped.releases) == ["0.30.0", "0.31.0", "0.32.0", "0.33.0"]
    deciding = {fact.name: fact for fact in shipped.facts if "rules" in fact.affects}
    for name in ("order and tokens of a step", "allocation of blocks"):
        assert {release for known in deciding[name].known for release in known.releases} == set(shipped.releases)
    assert len(deciding["order and tokens of a step"].known) == 4
    for fact in shipped.facts:
        assert all(known.digest for known in fact.known), fact.name
    rules = {release: shipped.rules_for(release) for release in shipped.releases}
    assert {release: None if found is None else found.name for release, found in rules.items()} == {
        "0.30.0": "vllm-paged-0.30",
        "0.31.0": "vllm-paged",
        "0.32.0": "vllm-paged",
        "0.33.0": "vllm-paged",
    }
