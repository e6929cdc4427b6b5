"""The page on devices: there for a fleet, with a picture, each device and the word that it is emulated; else not."""

from __future__ import annotations

from pathlib import Path

from harness.present.report import write_report
from harness.runner import run_experiment
from tests.support.bare_reports import with_figures
from tests.support.experiments import small_experiment


def page_of(folder: Path, **changes: object) -> str:
    spec = small_experiment(**{"backend": "sim", "replicates": 4, **changes})
    runs = run_experiment(spec, runs_root=folder).runs
    with with_figures():
        return write_report(runs, folder / "report.html").read_text()


def test_a_fleet_has_a_page_on_its_devices_and_one_device_has_none(tmp_path: Path) -> None:
    fleet = {"devices": [0, 4], "emulated": {4: {"speed_offset": 0.05, "noise": 0.001}}}
    page = page_of(tmp_path / "two", fleet=fleet)
    section = page[page.index('id="devices"') : page.index('id="results"')]
    assert "<b>simulated</b> devices" in section
    assert 'aria-label="How fast each device is' in section
    for table in ("devices", "effect by device", "what the devices record"):
        assert page.count(f"<h3>{table}</h3>") == 1
    assert section.index("dev0") < section.index("dev4")
    assert 'id="devices"' not in page_of(tmp_path / "one", fleet={"devices": [0]})
