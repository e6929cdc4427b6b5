"""The alarm calls what changed in what rules and grammar rest on, shows it, and is calm about everything else."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from release_wheels import QUEUE, SCHEDULER, SOURCE, empty_table, stack, wheel

from harness.errors import SpecError
from harness.stacks.rbln.launch.releases import (
    FACTS,
    FactTable,
    ReleaseCheck,
    check_release,
    load_table,
    recorded,
    rules_installed,
    write_table,
)
from harness.stacks.rbln.launch.sources import Release, open_sources, vllm_beside, wheel_beside


def _read(folder: Path, *wheels: Path) -> FactTable:
    """A table with these releases recorded, in this order."""
    _path, table = load_table(empty_table(folder))
    for one in wheels:
        rbln = open_sources(one)
        table = recorded(table, Release(rbln, vllm_beside(rbln)))
    return table


def _check(table: FactTable, path: Path, *, against: str = "") -> ReleaseCheck:
    rbln = open_sources(path)
    find = lambda package, version: wheel_beside(path, package, version)  # noqa: E731
    return check_release(table, Release(rbln, vllm_beside(rbln)), against=against, find=find)


def _verdicts(found: ReleaseCheck) -> dict[str, str]:
    return {use.what: use.verdict for use in found.uses}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# the oldest first", "# whoever came first\n"),
        ('"""Decides."""', '"""Says who is next."""'),
        ("waiting: list[int]) -> int", "waiting) -> 'int | None'"),
        ("len(self.running) == self.limit", "(len(self.running)\n                == self.limit)"),
        ('"chose %d", request', '"took %d of %d", request, len(waiting)'),
        ('"full"', '"no room left"'),
        ("return 1", "return 2"),
        ("class Scheduler:", "def helper():\n    pass\n\n\nclass Scheduler:"),
    ],
)
def test_what_decides_nothing_leaves_the_alarm_calm(tmp_path: Path, old: str, new: str) -> None:
    table = _read(tmp_path, stack(tmp_path, "0.12.0"))
    assert old in SOURCE
    found = _check(table, stack(tmp_path, "0.12.1", SOURCE.replace(old, new)))
    assert found.changed == ()
    assert (_verdicts(found)["rules"], found.compared_with) == ("yes", "0.12.0")


def test_a_changed_decision_is_named_with_the_lines_that_went_and_came(tmp_path: Path) -> None:
    table = _read(tmp_path, stack(tmp_path, "0.12.0"))
    found = _check(table, stack(tmp_path, "0.12.1", SOURCE.replace("waiting[0]", "waiting[-1]")))
    (changed,) = found.changed
    assert (changed.fact.name, changed.fact.file) == ("order", SCHEDULER)
    assert changed.diff == ("@ def schedule", "- request = waiting[0]", "+ request = waiting[-1]")
    assert _verdicts(found) | {"patch": "", "observer": ""} == {
        "rules": "unknown",
        "log grammar": "yes",
        "metrics": "yes",
        "launch": "yes",
        "patch": "",
        "observer": "",
    }


def test_without_the_old_wheel_the_diff_still_shows_what_came(tmp_path: Path) -> None:
    old = stack(tmp_path, "0.12.0")
    table = _read(tmp_path, old)
    old.unlink()
    found = _check(table, stack(tmp_path, "0.12.1", SOURCE.replace("waiting[0]", "waiting[-1]")))
    assert found.changed[0].diff == ("@ def schedule", "- 1 statement(s)", "+ request = waiting[-1]")


def test_a_changed_log_format_is_called(tmp_path: Path) -> None:
    table = _read(tmp_path, stack(tmp_path, "0.12.0"))
    found = _check(table, stack(tmp_path, "0.12.1", SOURCE.replace("REQUEST=%s", "REQ=%s")))
    assert found.changed[0].diff == ("- '[PFX] [ALLOC] REQUEST=%s'", "+ '[PFX] [ALLOC] REQ=%s'")
    assert (_verdicts(found)["rules"], _verdicts(found)["log grammar"]) == ("yes", "unknown")


def test_a_function_that_is_gone_is_called(tmp_path: Path) -> None:
    table = _read(tmp_path, stack(tmp_path, "0.12.0"))
    found = _check(table, stack(tmp_path, "0.12.1", SOURCE.replace("def schedule", "def plan")))
    assert found.changed[0].diff == ("- all of it was removed",)


def test_rules_of_two_releases_do_not_make_those_of_a_third(tmp_path: Path) -> None:
    """Each fact stands so in some release, but not all in one: the sum of both was never read."""
    first = stack(tmp_path, "0.11.1", vllm="0.22.0")
    second = stack(
        tmp_path, "0.12.0", SOURCE.replace("waiting[0]", "waiting[1]"), queue=QUEUE.replace("popleft", "pop")
    )
    table = _read(tmp_path, first, second)
    mixed = stack(tmp_path, "0.13.0", vllm="0.33.0", queue=QUEUE.replace("popleft", "pop"))
    found = _check(table, mixed)
    assert _verdicts(found)["rules"] == "unknown"
    assert [one.known_in for one in found.changed] in ([("0.11.1",)], [("0.30.0",)])


def test_compared_with_one_release_alone_a_later_one_is_as_if_unread(tmp_path: Path) -> None:
    later = stack(tmp_path, "0.12.0", SOURCE.replace("waiting[0]", "waiting[1]"))
    table = _read(tmp_path, stack(tmp_path, "0.11.1"), later)
    assert _check(table, later).changed == ()
    assert [one.fact.name for one in _check(table, later, against="0.11.1").changed] == ["order"]


def test_the_vllm_that_is_pinned_counts_as_recorded_and_an_unknown_one_as_unknown(tmp_path: Path) -> None:
    table = _read(tmp_path, stack(tmp_path, "0.12.0"))
    (tmp_path / "vllm-0.30.0-py3-none-any.whl").unlink()
    found = _check(table, wheel(tmp_path, "0.12.1", {SCHEDULER: SOURCE}, pin="0.30.0"))
    assert (found.vllm_source, _verdicts(found)["rules"]) == ("recorded", "yes")
    found = _check(table, wheel(tmp_path, "0.12.1", {SCHEDULER: SOURCE}, pin="0.99.0"))
    assert (found.vllm_source, _verdicts(found)["rules"]) == ("not found", "unknown")


def test_a_run_follows_the_rules_that_the_check_names_whatever_the_version_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.12.1a0 decided as 0.12.0 did, and 0.12.1a8 no longer does."""
    known = _read(tmp_path, stack(tmp_path, "0.12.0"), stack(tmp_path, "0.12.1a8", SOURCE.replace("[0]", "[-1]")))
    place = tmp_path / "known.json"
    write_table(known, place)
    monkeypatch.setitem(FACTS, "vllm_rbln", place)
    sources = {"0.12.0": SOURCE, "0.12.1": SOURCE.replace("[0]", "[-1]"), None: SOURCE.replace("[0]", "[1]")}
    for number, (expected, source) in enumerate(sources.items()):
        release = stack(tmp_path, f"0.12.1a{number}", source)
        site = tmp_path / f"site-{number}"
        for path in (release, tmp_path / "vllm-0.30.0-py3-none-any.whl"):
            with zipfile.ZipFile(path) as archive:
                archive.extractall(site)
        for package in ("vllm_rbln", "vllm"):
            (site / package / "__init__.py").write_text("")
        name = None if (rules := rules_installed(site)) is None else rules.name
        checked = _check(known, release).rules
        assert name == (None if checked is None else checked.name)
        assert name == (None if expected is None else f"vendor-{expected}")
    assert rules_installed(tmp_path / "nothing") is None


def test_source_that_is_no_python_is_one_line(tmp_path: Path) -> None:
    table = _read(tmp_path, stack(tmp_path, "0.12.0"))
    with pytest.raises(SpecError, match=r"optimum_scheduler.py: is not Python that this interpreter can parse"):
        _check(table, stack(tmp_path, "0.12.1", "def schedule(:\n"))


def test_the_shipped_table_says_what_stands_in_every_release_that_was_read() -> None:
    _path, table = load_table()
    assert {"0.11.1", "0.11.2", "0.12.0", "0.12.1a8"} <= set(table.releases)
    for release in table.releases:
        for fact in table.facts:
            assert fact.known_of(table.release_of(fact, release)) is not None, f"{fact.name} of {release}"


def _digest(fact_name: str, release: str) -> str:
    _path, table = load_table()
    (fact,) = [one for one in table.facts if one.name == fact_name]
    return fact.known_of(table.release_of(fact, release)).digest


def test_the_shipped_table_tells_the_repaired_index_and_the_new_queues_apart() -> None:
    assert _digest("block index", "0.11.1") != _digest("block index", "0.11.2") == _digest("block index", "0.12.0")
    assert _digest("limits and queues", "0.12.0") != _digest("limits and queues", "0.12.1a8")
    assert len({_digest("eviction order of slots", one) for one in ("0.11.1", "0.11.2", "0.12.0", "0.12.1a8")}) == 1
    assert len({_digest("bucket rule", one) for one in ("0.11.1", "0.11.2", "0.12.0", "0.12.1a8")}) == 1
