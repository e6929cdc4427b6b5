"""Lines and modules stand beside the budget that the table of a page gives them."""

from __future__ import annotations

from pathlib import Path

from tools.line_budget import ROOT, Size, budgets, lines_of

TABLE = "| part | lines | modules |\n|---|---|---|\n| `harness` | 1,000 | 2 |\n| `harness/model` | 3 | 1 |\n"


def test_a_folder_of_the_table_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "harness" / "model").mkdir(parents=True)
    (tmp_path / "harness" / "a.py").write_text("1\n2\n")
    (tmp_path / "harness" / "model" / "b.py").write_text("1\n2\n3\n4\n")
    assert budgets(TABLE) == {"harness": Size(1000, 2), "harness/model": Size(3, 1)}
    words = [" ".join(line.split()) for line in lines_of(budgets(TABLE), tmp_path)]
    assert words[:3] == [
        "harness, the rest 2 of 1,000 lines 1 of 2 modules",
        "harness/model 4 of 3 lines 1 of 1 modules",
        "all of harness 6 of 1,003 lines 2 of 3 modules",
    ]


def test_every_wing_has_a_budget() -> None:
    allowed = budgets((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    wings = {f"harness/{path.parent.name}" for path in (ROOT / "harness").glob("*/__init__.py")}
    assert wings - {"harness/html", "harness/compiled"} <= set(allowed)
