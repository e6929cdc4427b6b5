"""What steps cost: the published examples to the nanosecond, filled-in buckets, flags, and bad files."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import SpecError
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.engine.cost import FS_PER_MS, find_cost_file
from harness.shipped import shipped_names

PAPER = load_cost_model("paper")


@pytest.mark.parametrize(("bucket", "ms"), [(6, 11.8975), (10, 14.0425), (16, 17.26), (24, 21.55), (32, 25.84)])
def test_unmeasured_buckets_lie_on_the_line_through_their_neighbours(bucket: int, ms: float) -> None:
    assert PAPER.bucket_fs(bucket) == round(ms * FS_PER_MS)
    assert bucket not in PAPER.f_fs


def test_measured_buckets_are_not_filled_in() -> None:
    assert [PAPER.bucket_fs(bucket) for bucket in (1, 2, 4, 8)] == [
        round(ms * FS_PER_MS) for ms in (9.870, 10.420, 10.825, 12.970)
    ]
    assert PAPER.interpolated_buckets((1, 4, 6, 8, 10, 16)) == (6, 10, 16)


def test_a_filled_in_value_is_never_a_reference() -> None:
    before = load_cost_model("paper")
    before.bucket_fs(6)
    assert before.bucket_fs(5) == PAPER.bucket_fs(5) == round(11.36125 * FS_PER_MS)


def test_decode_step_time() -> None:
    assert PAPER.decode_step_ns(8, 8) == 13_801_400
    assert PAPER.decode_step_ns(1, 1) == 10_412_300
    assert PAPER.decode_step_ns(6, 5) == 12_605_000


@pytest.mark.parametrize(
    ("tokens", "ns"), [(0, 0), (1, 21_206_640), (128, 21_287_907), (129, 42_577_094), (2008, 359_854_707)]
)
def test_prefill_time(tokens: int, ns: int) -> None:
    assert PAPER.prefill_ns(tokens) == ns


def test_prefill_outside_the_fitted_lengths_is_flagged() -> None:
    # The range behind the operational fits was not published: every length is flagged.
    assert load_cost_model("operational-prefill-1-2-4-8").is_prefill_extrapolated(1000)
    assert [PAPER.is_prefill_extrapolated(tokens) for tokens in (0, 88, 500, 6000, 6001)] == [
        False,
        True,
        False,
        False,
        True,
    ]


def test_context_makes_steps_longer() -> None:
    model = load_cost_model("context-1-2-4-8")
    assert model.decode_step_ns(8, 8, 8 * 1500) == round((13.46253 - 8 * 0.004913 + 12000 * 0.145345e-3) * 1e6)
    assert model.is_context_extrapolated(8, 8 * 200)
    assert not model.is_context_extrapolated(8, 8 * 1500)


def test_context_models_meet_the_measured_step_times() -> None:
    model = load_cost_model("context-1-4-6-8-10-16")
    measured_ms = {(1, 1): 10.62, (4, 4): 12.27, (8, 8): 14.95}
    for (bucket, num_seqs), ms in measured_ms.items():
        assert model.decode_step_ns(bucket, num_seqs, num_seqs * 1500) / 1e6 == pytest.approx(ms, rel=0.03)


def test_every_shipped_file_loads_and_says_where_it_comes_from() -> None:
    assert {"paper", "context-1-2-4-8", "operational-prefill-1-2-4-8"} <= set(shipped_names("costs"))
    config = EngineConfig(8, (1, 2, 4, 8), 8)
    for name in shipped_names("costs"):
        model = load_cost_model(name)
        assert model.name == name
        assert model.source
        assert all(cost > 0 for cost in model.decode_base_fs(config)[1:])


def test_a_users_own_file_is_read_by_path(tmp_path: Path) -> None:
    source = find_cost_file("paper")
    own = tmp_path / "mine.toml"
    own.write_text(source.read_text(encoding="utf-8").replace('"paper"', '"mine"'), encoding="utf-8")
    assert load_cost_model(own).prefill_ns(2008) == PAPER.prefill_ns(2008)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name = 3", "decode: is missing"),
        ("name = ", "not valid TOML"),
        ('name="x"\nsource="y"\nspeed=1\n[decode.f_ms]\n1=9.0\n[prefill]\nper_call_ms=1.0', "speed"),
        ('name="x"\nsource="y"\n[decode.f_ms]\n1=-9.0\n[prefill]\nper_call_ms=1.0', "greater than 0"),
        ('name="x"\nsource="y"\n[decode.f_ms]\n1=9870.0\n[prefill]\nper_call_ms=1.0', "more than one second"),
        ('name="x"\nsource="y"\n[decode]\nf_ms = {}\n[prefill]\nper_call_ms=1.0', "f_ms"),
        (f"name = {'9' * 2000}e-{'9' * 2000}", "a number in it is too long"),
    ],
)
def test_a_bad_cost_file_is_one_clear_error(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=complaint) as raised:
        load_cost_model(path)
    assert raised.value.where == str(path)


def test_an_unknown_cost_model_lists_the_known_ones() -> None:
    with pytest.raises(SpecError, match="paper"):
        load_cost_model("papper")
