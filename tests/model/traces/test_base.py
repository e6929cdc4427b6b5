"""Values of JSON that readers share: an instant is the same in every zone, and notes of two readings add up."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from harness.model.traces.account import ReadNotes
from harness.model.traces.values import instant_ns, parsed_json, seconds_ns

ZONES = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@given(moment=st.datetimes(datetime(1970, 1, 3), datetime(2100, 1, 1), timezones=ZONES))
def test_an_instant_is_its_time_since_1970_in_every_zone(moment: datetime) -> None:
    expected = (moment - EPOCH) // timedelta(microseconds=1) * 1_000
    assert instant_ns(moment.isoformat()) == expected
    in_utc = moment.astimezone(timezone.utc).replace(tzinfo=None).isoformat()
    assert instant_ns(in_utc) == instant_ns(f"{in_utc}Z") == expected


def test_what_is_no_finite_number_is_no_time() -> None:
    assert parsed_json(b'{"t": NaN}') is parsed_json(b'{"t": Infinity}') is None
    assert seconds_ns(True) is seconds_ns("1") is seconds_ns(1e300) is None
    assert seconds_ns(-1.5) is None
    assert seconds_ns(1.5) == 1_500_000_000


def test_notes_of_two_readings_add_up() -> None:
    both, other = ReadNotes(), ReadNotes()
    for notes, at in ((both, "a"), (other, "b")):
        notes.num_rows += 3
        notes.num_calls += 1
        notes.part()
        notes.row_unknown("x", at)
        notes.hold("sums", 50, [20, 10])
    other.hold("others", 7, [])
    both.take_over(other)
    assert both.labels == (
        "1 x others: 7 stated, 0 counted",
        "2 x sums: 100 stated, 60 counted",
        "2 x rows of the unknown type 'x'",
    )
    assert both.rows == {"calls": 2, "parts of calls": 2, "passed over": 0, "broken": 0, "unknown": 2}
    assert both.first_at["x"] == "a"
    both.check(2)
