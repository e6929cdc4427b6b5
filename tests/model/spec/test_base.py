"""Problems in an experiment file are told where a person finds them: by line, and by a condition's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import SpecError
from harness.model.spec import load_experiment
from harness.model.spec.base import key_lines, load_toml

TEXT = """\
name = "mine"
base_seed = 1
workload = { num_sessions = 4 }

[[condition]]
name = "base"

[[condition]]
name = "more"
server.kv_slotz = 12
[condition.workload]
num_sessions = 0
"""


def test_keys_of_headings_lists_and_dotted_names_have_their_lines(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TEXT)
    lines = key_lines(tmp_path / "mine.toml")
    assert lines["workload",] == 3
    assert lines["condition", 1, "server", "kv_slotz"] == 10
    assert lines["condition", 1, "workload", "num_sessions"] == 12


def test_a_wrong_key_of_a_condition_is_named_by_the_condition_and_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT)
    with pytest.raises(SpecError) as refused:
        load_experiment(path)
    assert "line 10: condition[more].server.kv_slotz: unknown key (did you mean kv_slots?)" in str(refused.value)
    path.write_text(TEXT.replace("server.kv_slotz = 12\n", ""))
    with pytest.raises(SpecError) as refused:
        load_experiment(path)
    assert "line 11: condition[more].workload.num_sessions: must be greater than or equal to 1" in str(refused.value)


def test_every_problem_is_told_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    wrong = TEXT.replace("base_seed = 1", 'base_seed = "x"\nreplicats = 3\nbaseline = "bse"')
    path.write_text(wrong.replace("num_sessions = 4", "num_sessions = 0") + "\n[slo]\nttft_ms = -1\n")
    with pytest.raises(SpecError) as refused:
        load_experiment(path)
    assert str(refused.value).removeprefix(f"{path}: ").split("; ") == [
        "line 2: base_seed: must be a whole number",
        "line 3: replicats: unknown key (did you mean replicates?)",
        "line 4: baseline: 'bse' is not one of the conditions base, more",
        "line 5: workload.num_sessions: must be greater than or equal to 1",
        "line 12: condition[more].server.kv_slotz: unknown key (did you mean kv_slots?)",
        "line 14: condition[more].workload.num_sessions: must be greater than or equal to 1",
        "line 17: slo.ttft_ms: must be greater than 0. See `harness explain experiment` for every key",
    ]


def test_a_value_that_is_no_number_is_told_by_its_line_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "m"\n[slo]\nttft_ms = nan\n[[condition]]\nname = "a"\n')
    with pytest.raises(SpecError, match=r"line 3: slo\.ttft_ms: must be a finite number"):
        load_experiment(path)


def test_files_that_an_experiment_names_are_found_beside_it(tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text('name = "short"\nwaits = { distribution = "constant", wait_s = 1 }\n')
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "m"\nbase_seed = 1\n[workload]\nnum_sessions = 1\nwaits = "short.toml"\n[[condition]]\nname = "a"\n'
    )
    assert load_experiment(path).workload.waits == str(tmp_path / "short.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a" + ".a" * 20_000 + " = 1", "a key is too long"),
        ("[" + '"a" . ' * 20_000 + "a]", "a key is too long"),
        ("# " + "x" * (1 << 20), "longer than 1 MiB"),
    ],
    ids=["key", "heading", "file"],
)
def test_a_file_that_would_take_for_ever_is_refused_at_once(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "long.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=f"cannot be read as TOML: {words}. Shorten it"):
        load_toml(path)


def test_many_points_in_values_are_no_long_key(tmp_path: Path) -> None:
    path = tmp_path / "values.toml"
    path.write_text(f'a = [{", ".join(["1.5"] * 500)}]\nb = "{"1." * 500}"\n')
    assert len(load_toml(path)["a"]) == 500
