"""rbln-metrics-exporter is asked through a run, read by the endings of its names, kept as it came, never in the way.

The golden text is made from the public facts alone: gauge family, members and labels. No exporter of a device was seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import ServerError
from harness.measure.server.ask import Get, ask_url
from harness.model.spec import ExperimentSpec
from harness.runner import run_experiment
from harness.stacks.rbln.launch.device_watch import (
    DeviceWatch,
    device_findings,
    devices_seen,
    exporter_report,
    from_exporter,
    read_exporter,
    total_power_w,
)
from tests.support.experiments import one_condition
from tests.support.processes import NO_PORT, VirtualClock
from tests.support.raw_server import RawServer, Reply, whole

LABELS = (
    'name="RBLN-CA25",uuid="u{0}",sid="A1",deviceID="1250",hostname="h",driver_version="3.2.2",firmware_version="1"'
)
GOLDEN = "\n".join(
    [
        "# HELP RBLN_DEVICE_STATUS:TEMPERATURE Device temperature",
        "# TYPE RBLN_DEVICE_STATUS:TEMPERATURE gauge",
        f"RBLN_DEVICE_STATUS:TEMPERATURE{{{LABELS.format(0)}}} 41",
        f"RBLN_DEVICE_STATUS:TEMPERATURE{{{LABELS.format(1)}}} 43.5",
        f"RBLN_DEVICE_STATUS:CARD_POWER{{{LABELS.format(0)}}} 57.3",
        f"RBLN_DEVICE_STATUS:CARD_POWER{{{LABELS.format(1)}}} NaN",
        f"RBLN_DEVICE_STATUS:DRAM_USED{{{LABELS.format(0)}}} 1.2e+09",
        f"RBLN_DEVICE_STATUS:DRAM_TOTAL{{{LABELS.format(0)}}} 1.6843096064e+10",
        f"RBLN_DEVICE_STATUS:UTILIZATION{{{LABELS.format(0)}}} 12.5",
        f"RBLN_DEVICE_STATUS:HEALTH{{{LABELS.format(0)}}} 1",
        f"RBLN_DEVICE_STATUS:SOMETHING_NEW{{{LABELS.format(0)}}} 7",
        "go_goroutines 12",
        'process_cpu_seconds_total{job="x"} 3',
        "this is no sample {",
    ]
)


class Exporter(RawServer):
    """A little exporter; ``status`` and ``body`` may be changed while it runs."""

    def __init__(self) -> None:
        super().__init__(lambda _asked: Reply([whole(self.body, status=self.status)]))
        self.body, self.status = GOLDEN, 200

    @property
    def metrics_url(self) -> str:
        return f"{self.url}/metrics"


def get_of(url: str) -> Get:
    return lambda deadline_s: ask_url(url, deadline_s=deadline_s)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with Exporter() as one:
        yield one


def test_dies_of_one_card_are_told_apart_by_uuid_though_they_share_their_device_id() -> None:
    assert exporter_report(GOLDEN)["readings"] == [
        {
            "device": "u0",
            "card": "A1",
            "temperature_c": 41.0,
            "card_power_w": 57.3,
            "memory_used_bytes": 1.2e9,
            "memory_total_bytes": 16843096064.0,
            "utilisation": 12.5,
            "health": 1.0,
            "units": {"temperature": "C", "card_power": "W", "memory": "B"},
        },
        {"device": "u1", "card": "A1", "temperature_c": 43.5, "units": {"temperature": "C"}},
    ]


def _family(prefix: str, members: dict[str, float]) -> str:
    names = [(f"{prefix}{member}", value) for member, value in members.items()]
    label = '{{name="rbln{0}",sid="A{1}",deviceID="1250"}}'
    return "\n".join(f"{name}{label.format(die, die // 2)} {value}" for name, value in names for die in range(4))


@pytest.mark.parametrize(
    "text",
    [
        _family("RBLN_DEVICE_STATUS:", {"TEMPERATURE": 41, "CARD_POWER": 60, "DRAM_USED": 1, "DRAM_TOTAL": 16}),
        _family("rbln_npu_", {"temperature": 41, "power": 60, "memory_used": 1, "memory_total": 16}),
    ],
)
def test_both_families_say_the_same_of_four_dies_on_two_cards(text: str) -> None:
    readings = exporter_report(text)["readings"]
    assert [(one["device"], one["card"]) for one in readings] == [(f"rbln{die}", f"A{die // 2}") for die in range(4)]
    assert {(one["temperature_c"], one["memory_total_bytes"]) for one in readings} == {(41.0, float(16 << 30))}
    assert total_power_w(readings) == 120.0


def watch_twice(exporter: Exporter, folder: Path) -> None:
    """Write what the exporter says before and after nothing."""
    source = from_exporter(exporter.metrics_url, get_of(exporter.metrics_url))
    with DeviceWatch(folder / "device_metrics.jsonl", source, VirtualClock(), interval_s=1e6):
        pass


def test_samples_without_a_name_or_uuid_are_counted_and_said(exporter: Exporter, tmp_path: Path) -> None:
    exporter.body = 'RBLN_DEVICE_STATUS:TEMPERATURE{deviceID="1250"} 41\n' * 2
    watch_twice(exporter, tmp_path)
    findings = device_findings(devices_seen(tmp_path))
    assert [one.code for one in findings] == ["devices-silent", "devices-unnamed"]
    assert "2 samples name no device" in findings[1].evidence


def test_an_unusual_unit_is_taken_by_magnitude_and_said(exporter: Exporter, tmp_path: Path) -> None:
    exporter.body = _family("rbln_npu_", {"temperature": 41_500, "power": 60_000_000})
    watch_twice(exporter, tmp_path)
    seen = devices_seen(tmp_path)["device_metrics.jsonl"]
    assert (seen["temperature_c"], seen["power_w"], seen["devices"]) == ([41.5, 41.5], [120.0, 120.0], 4)
    (finding,) = device_findings({"device_metrics.jsonl": seen})
    assert "card_power was read as uW by magnitude; temperature was read as mC by magnitude" in finding.evidence


@pytest.mark.parametrize(
    "line",
    [
        'rbln_device_temperature{npu="3"} 40',
        'RBLN_DEVICE_TEMPERATURE_TEMP{name="rbln3"} 40',
        'rbln:temperature{device="rbln3",le="x\\"y"} 40 1700000000000',
    ],
)
def test_other_names_are_read_by_their_endings(line: str) -> None:
    (reading,) = exporter_report(line)["readings"]
    assert (reading["device"], reading["temperature_c"]) == ("rbln3", 40.0)


@pytest.mark.parametrize("text", ["", "<html>not metrics</html>", "RBLN_X{", 'a{deviceID="0"} b', 'a{deviceID="?"} 1'])
def test_what_is_no_sample_is_passed_over(text: str) -> None:
    assert exporter_report(text)["readings"] == []


def test_lines_about_devices_are_kept_as_they_came_even_when_no_ending_fits(exporter: Exporter, tmp_path: Path) -> None:
    watch_twice(exporter, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "device_metrics.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["before", "after"]
    assert lines[0]["raw"] == GOLDEN
    assert len(lines[0]["samples"]) == 9
    assert any("SOMETHING_NEW" in sample for sample in lines[0]["samples"])
    seen = devices_seen(tmp_path)["device_metrics.jsonl"]
    assert (seen["temperature_c"], seen["card_power_w"], seen["devices"]) == ([41.0, 43.5], [57.3, 57.3], 2)
    assert device_findings({"device_metrics.jsonl": seen}) == []
    assert [asked.path for asked in exporter.asked] == ["/metrics", "/metrics"]


def test_an_exporter_that_is_not_there_or_ill_is_an_error_that_names_the_key(exporter: Exporter) -> None:
    url = f"http://127.0.0.1:{NO_PORT}/metrics"
    with pytest.raises(
        ServerError, match=r"gives no answer \(ConnectionRefusedError\).*Check server.device_metrics_url"
    ):
        read_exporter(url, get_of(url))
    exporter.status = 500
    with pytest.raises(ServerError, match="answers with status 500"):
        read_exporter(exporter.metrics_url, get_of(exporter.metrics_url))


@pytest.mark.parametrize("url", ["127.0.0.1:9090", "ftp://h/metrics", "http://user:pw@h/metrics"])
def test_an_address_that_cannot_be_asked_is_refused_in_the_file(url: str) -> None:
    with pytest.raises(ValueError, match="not http://HOST:PORT/metrics"):
        _spec(url)


def _spec(url: str) -> ExperimentSpec:
    workload = {"source": "sequential", "num_background": 0}
    return one_condition("watched", time_scale=8.0, workload=workload, server={"device_metrics_url": url})


@pytest.mark.live
def test_a_run_keeps_what_the_exporter_said_and_its_manifest_says_it_in_short(
    exporter: Exporter, tmp_path: Path
) -> None:
    (run,) = run_experiment(_spec(exporter.metrics_url), runs_root=tmp_path).runs
    assert run.is_valid, run.invalid_reasons
    lines = [json.loads(line) for line in run.file("device_metrics.jsonl").read_text().splitlines()]
    assert [lines[0]["reason"], lines[-1]["reason"]] == ["before", "after"]
    assert lines[-1]["raw"] == GOLDEN
    assert run.manifest.server.facts["devices"]["device_metrics.jsonl"]["temperature_c"] == [41.0, 43.5]


@pytest.mark.live
def test_a_silent_exporter_spoils_no_run_and_is_said(tmp_path: Path) -> None:
    (run,) = run_experiment(_spec(f"http://127.0.0.1:{NO_PORT}/metrics"), runs_root=tmp_path).runs
    assert run.is_valid, run.invalid_reasons
    (finding,) = [one for one in run.manifest.findings if one.code == "devices-silent"]
    assert "gives no answer (ConnectionRefusedError)" in finding.evidence
    assert finding.severity == "warning"


def test_the_power_of_each_gpu_is_read_from_exporters_over_nvml() -> None:
    text = """
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-aa",device="nvidia0"} 310.5
DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-bb",device="nvidia1"} 90
nvidia_smi_power_draw_watts{uuid="GPU-cc"} 60
"""
    readings = exporter_report(text)["readings"]
    assert {row["device"]: row["card_power_w"] for row in readings} == {"GPU-aa": 310.5, "GPU-bb": 90.0, "GPU-cc": 60.0}
    assert total_power_w(readings) == 460.5
