from __future__ import annotations

import pytest

from harness.kinds import origin_note
from harness.measure.records.manifest import ClientAudit, LaunchReport, table_at
from tests.support.analysis_tables import manifest


def test_a_report_that_was_not_made_is_absent_and_not_zero():
    assert LaunchReport.tolerant(None).decode_p50_ms("MODEL") is None
    assert ClientAudit.tolerant({}).num_stalls is None
    assert ClientAudit.tolerant({}).floor_lag_ms == ()


def test_the_model_time_of_a_server_is_read_from_its_report():
    report = LaunchReport.tolerant({"device_metrics": {"MODEL": {"decode": {"p50_ms": 9.87}}}, "of_a_later_version": 1})
    assert report.decode_p50_ms("MODEL") == 9.87
    assert report.decode_p50_ms("SAMPLER") is None


def test_a_key_that_does_not_read_is_left_out_and_the_rest_stands():
    audit = ClientAudit.tolerant({"num_stalls": "many", "stall_max_ms": 3.5})
    assert (audit.num_stalls, audit.stall_max_ms) == (None, 3.5)


def test_the_floor_of_the_lag_is_that_of_re_arrivals():
    audit = {"floor_lag_ms": [0.1], "floor_rearrival_lag_ms": [0.3]}
    assert ClientAudit.tolerant({"self_audit": audit}).floor_lag_ms == (0.3,)


def test_what_is_no_table_holds_nothing_below_it():
    assert table_at({"launch": {"requested": {"versions": {"vllm-rbln": "0.12.0"}}}}, "launch", "requested", "versions")
    for broken in ({"launch": -1}, {"launch": {"requested": [1]}}, {}, None, "text"):
        assert table_at(broken, "launch", "requested") == {}


@pytest.mark.parametrize(
    ("versions", "is_on_cpu"),
    [
        ({"vllm": "0.32.0+cpu"}, True),
        ({"vllm": "0.32.0"}, False),
        ({"vllm": "0.22.0+cpu", "vllm-rbln": "0.12.0"}, False),
        ({}, False),
    ],
)
def test_a_build_of_vllm_for_cpus_is_told_from_the_one_that_drives_an_npu(versions: dict[str, str], is_on_cpu: bool):
    server = {"facts": {"launch": {"requested": {"versions": versions}}}}
    assert manifest(server=server).is_on_cpu is is_on_cpu


@pytest.mark.parametrize(
    ("report", "device"),
    [
        (
            {"KMD_version": "3.0.0", "devices": [{"npu": 0, "name": "RBLN-CA25"}, {"name": "RBLN-CA25"}]},
            "RBLN-CA25, driver 3.0.0",
        ),
        ({"devices": [{"npu": 0, "name": "RBLN-CA22"}]}, "RBLN-CA22"),
        ({"KMD_version": "3.0.0", "devices": [{"npu": 0}, "rbln1"]}, ""),
        ({"devices": "none"}, ""),
        (None, ""),
    ],
)
def test_a_device_is_what_the_tool_of_its_driver_named(report: object, device: str):
    served = manifest(backend="rbln", server={"facts": {"launch": {"requested": {"devices": report}}}})
    assert served.device == device
    shown = f"its device tool reported {device}." if device else "no record shows which device."
    assert origin_note("rbln", device=served.device) == f"Measured by backend rbln; {shown}"
