"""Device reports are read leniently, kept raw, and a device that is busy, ill or missing is refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ServerError
from harness.stacks.rbln.launch.device_watch import DeviceWatch, from_driver, total_power_w
from harness.stacks.rbln.launch.devices import Device, parse_devices, read_devices, readings, require_idle
from tests.support.processes import VirtualClock

# Keys and units as public readers of the format describe them, for two generations of drivers.
NEWER: dict[str, Any] = {
    "KMD_version": "3.2.2",
    "devices": [
        {
            "npu": npu,
            "name": "RBLN-CA25",
            "sid": "A1",
            "uuid": f"u{npu}",
            "device": f"rbln{npu}",
            "status": "normal",
            "fw_ver": "1.2",
            "pci": {"bus_id": "0000:3b:00.0", "link_width": "16"},
            "temperature": "41C",
            "card_power": "57.3W",
            "pstate": "P14",
            "memory": {"used": "1.5GiB", "total": "15.7GiB"},
            "util": "12.5",
            "board_info": {},
            "group_id": 0,
        }
        for npu in range(4)
    ],
    "contexts": [{"ctx_id": "1", "npu": "2", "process": "python3", "pid": "4242", "memalloc": "1.5GiB"}],
}
OLDER: dict[str, Any] = {
    "KMD_version": "1.1.0",
    "devices": [
        {
            "npu": "0",
            "name": "RBLN-CA12",
            "status": "normal",
            "temperature": 38,
            "card_power": "34140 mW",
            "util": 0,
            "memory": {"used": "0", "total": "17179869184"},
        },
        {"npu": "rbln1", "name": "RBLN-CA12", "temperature": None, "memory": None},
    ],
    "contexts": [],
}


def test_a_newer_drivers_report_is_read() -> None:
    report = parse_devices(json.dumps(NEWER))
    assert report.kmd_version == "3.2.2"
    assert report.devices[1] == Device(
        npu=1,
        name="RBLN-CA25",
        uuid="u1",
        device="rbln1",
        card="A1",
        status="normal",
        temperature_c=41.0,
        card_power_w=57.3,
        utilisation=12.5,
        memory_used_bytes=1610612736,
        memory_total_bytes=int(15.7 * (1 << 30)),
        group="0",
        units=(("temperature", "C"), ("card_power", "W"), ("memory", "GiB")),
    )
    assert [(use.npu, use.pid, use.process) for use in report.uses] == [(2, 4242, "python3")]
    assert report.raw == NEWER


def test_an_older_drivers_types_are_read_too_and_what_is_missing_is_absent() -> None:
    first, second = parse_devices(f"== header of some drivers ==\n{json.dumps(OLDER)}").devices
    assert (first.npu, first.temperature_c, first.card_power_w, first.memory_total_bytes) == (0, 38.0, 34.14, 1 << 34)
    assert (second.npu, second.temperature_c, second.memory_used_bytes, second.group) == (1, None, None, "")


@pytest.mark.parametrize(
    "shape",
    [
        {"devices": {row["device"]: {k: v for k, v in row.items() if k != "device"} for row in NEWER["devices"]}},
        {"groups": [{"group_id": 0, "devices": NEWER["devices"]}]},
        {
            "devices": [
                {**row, "memory": None, "memory_used": "1.5GiB", "memory_total": "15.7GiB"} for row in NEWER["devices"]
            ]
        },
    ],
)
def test_the_same_devices_in_another_shape_are_the_same_devices(shape: dict[str, Any]) -> None:
    assert parse_devices(json.dumps(shape)).devices == parse_devices(json.dumps(NEWER)).devices


def test_the_power_of_a_card_counts_once_for_its_four_dies() -> None:
    two_cards = [{**row, "sid": f"A{at // 2}"} for at, row in enumerate(NEWER["devices"])]
    assert total_power_w(readings(parse_devices(json.dumps(NEWER)))) == 57.3
    assert total_power_w(readings(parse_devices(json.dumps({"devices": two_cards})))) == pytest.approx(114.6)


def test_without_a_board_nobody_adds_powers_up() -> None:
    rows = [{**row, "sid": ""} for row in NEWER["devices"]]
    assert total_power_w(readings(parse_devices(json.dumps({"devices": rows})))) is None


@pytest.mark.parametrize("text", ["{}", '{"devices": null, "contexts": "none"}', '{"devices": [3, null]}'])
def test_a_report_of_nothing_is_no_fault(text: str) -> None:
    report = parse_devices(text)
    assert report.devices == ()
    assert report.uses == ()


def test_output_that_is_no_json_is_one_line() -> None:
    with pytest.raises(ServerError, match="its output is not JSON"):
        parse_devices("driver not loaded")


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ((1, 2), r"the chosen devices are busy: device 2 by pid 4242 \(python3\)\. End that process"),
        ((3, 4), "device 4 does not exist; there are 0, 1, 2, 3"),
    ],
)
def test_devices_that_cannot_be_used_are_refused(devices: tuple[int, ...], message: str) -> None:
    with pytest.raises(ServerError, match=message):
        require_idle(devices, parse_devices(json.dumps(NEWER)))


def test_a_device_that_is_not_well_is_refused() -> None:
    ill = json.loads(json.dumps(NEWER))
    ill["devices"][0]["status"] = "error"
    with pytest.raises(ServerError, match="device 0 reports status 'error'"):
        require_idle((0,), parse_devices(json.dumps(ill)))


def test_idle_devices_pass_and_others_work_does_not_matter() -> None:
    report = parse_devices(json.dumps(NEWER))
    assert require_idle((0, 1, 3), report) is report


def test_a_command_that_fails_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "smi.py"
    script.write_text("import sys; sys.exit('no such driver')")
    with pytest.raises(ServerError, match="fails with status 1: no such driver"):
        read_devices((sys.executable, str(script)))


def test_a_host_without_the_command_has_no_report() -> None:
    assert read_devices(()) is None


def test_the_state_before_and_after_a_run_is_kept_raw(tmp_path: Path) -> None:
    script = tmp_path / "smi.py"
    script.write_text(f"print({json.dumps(NEWER)!r})")
    with DeviceWatch(
        tmp_path / "devices.jsonl", from_driver((sys.executable, str(script))), VirtualClock(7), interval_s=1e6
    ):
        pass
    lines = [json.loads(line) for line in (tmp_path / "devices.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["before", "after"]
    assert lines[0]["raw"] == NEWER
    assert lines[0]["readings"][0]["temperature_c"] == 41.0


def test_a_driver_that_fails_during_a_run_is_a_line_and_no_error(tmp_path: Path) -> None:
    with DeviceWatch(
        tmp_path / "devices.jsonl", from_driver((str(tmp_path / "gone"),)), VirtualClock(), interval_s=1e6
    ):
        pass
    lines = (tmp_path / "devices.jsonl").read_text().splitlines()
    assert ["gives no answer" in json.loads(line)["error"] for line in lines] == [True, True]


def test_without_devices_nothing_is_watched(tmp_path: Path) -> None:
    with DeviceWatch(tmp_path / "devices.jsonl", from_driver(()), VirtualClock()):
        pass
    assert not (tmp_path / "devices.jsonl").exists()
