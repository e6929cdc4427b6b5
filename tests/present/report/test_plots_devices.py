"""The page on devices: there for a fleet, with a picture, each device and the word that it is emulated; else not."""

from __future__ import annotations

from pathlib import Path

from harness.present.report import write_report
from harness.runner import run_experiment
from tests.support.bare_reports import with_figures
from tests.support.experiments import small_experiment


def page_of(folder: Path, **fleet: object) -> str:
    runs = run_experiment(small_experiment(backend="sim", replicates=4, fleet=fleet), runs_root=folder).runs
    return write_report(runs, folder / "report.html").read_text()


def test_a_fleet_has_a_page_on_its_devices_and_one_device_has_none(tmp_path: Path) -> None:
    with with_figures():
        page = page_of(tmp_path / "two", devices=[0, 4], emulated={4: {"speed_offset": 0.05, "noise": 0.001}})
    section = page[page.index('id="devices"') : page.index('id="results"')]
    assert "<b>simulated</b> devices" in section
    assert 'aria-label="How fast each device is' in section
    for table in ("devices", "effect by device", "what the devices record"):
        assert page.count(f"<h3>{table}</h3>") == 1
    assert section.index("dev0") < section.index("dev4")
    assert 'id="devices"' not in page_of(tmp_path / "one", devices=[0])
