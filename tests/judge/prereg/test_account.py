"""Frozen runs that are INVALID: nothing is decided while they may be repeated."""

from __future__ import annotations

import json

import pytest

from harness.errors import SpecError
from harness.judge.decisions.decide import Decision, Outcome
from harness.judge.prereg import authorize, decide
from harness.judge.prereg.judge import Judgement
from harness.run_key import RunKey
from tests.judge.prereg.test_authorize import FROZEN_STOP, harness
from tests.support.workplace import STALLED, Workplace, ends_after_one_run


def only(judgement: Judgement) -> Decision:
    (decision,) = judgement.decisions
    return decision


def test_nothing_is_decided_while_an_invalid_run_may_still_be_repeated(still_open: Workplace) -> None:
    place, frozen = still_open, still_open.frozen
    judgement = decide(place.sealed)
    decision = only(judgement)
    assert decision.outcome is Outcome.WITHHELD
    assert decision.reason.startswith(f"base/1 is INVALID ({STALLED}) and may still be repeated, 0 of 1 repetitions")
    assert "so far PASS" in decision.reason
    assert judgement.blocks_of(decision) == " (2 of 3 blocks)"
    # Repeated, and valid this time: every frozen run has its end.
    place.run_confirmatory(frozen, resume=True, retry_invalid=True)
    judgement = decide(place.sealed)
    assert only(judgement).outcome is Outcome.PASS
    assert judgement.blocks_of(only(judgement)) == " (3 of 3 blocks)"
    assert any(line.startswith("repeated base/1, valid now; was INVALID: ") for line in judgement.account_lines)


def test_the_decision_stands_on_fewer_blocks_once_the_repetitions_are_used_up(still_open: Workplace) -> None:
    place, frozen = still_open, still_open.frozen
    place.run_confirmatory(frozen, busy=["base/1"], resume=True, retry_invalid=True)
    decided = harness(place, "decide", "small", "--runs", "runs")
    assert decided.returncode == 0, decided.stderr
    assert "PASS  mine: more (2 of 3 blocks)" in decided.stdout
    assert f"INVALID base/1: {STALLED}; 1 of 1 repetitions used" in decided.stdout
    assert "6 runs in 3 blocks; 5 valid, 1 INVALID; 2 of 3 blocks valid as a whole" in decided.stdout
    assert "repetitions: at most 1 of an INVALID run, 1 used" in decided.stdout
    assert decided.stdout.startswith("Predicted: simulated in virtual time")
    told = harness(place, "decide", "small", "--runs", "runs", "--format", "json")
    (record,) = json.loads(told.stdout)
    assert (record["blocks"], record["planned_blocks"]) == (2, 3)
    assert "simulated" in record["origin"]


def test_runs_without_any_repetition_are_decided_at_once_and_say_on_how_many_blocks(place: Workplace) -> None:
    place.allow_retries(0)
    place.run_confirmatory(place.freeze().path, busy=["base/1"])
    judgement = decide(place.sealed)
    assert only(judgement).outcome is Outcome.PASS
    assert judgement.blocks_of(only(judgement)) == " (2 of 3 blocks)"
    assert "no repetition of an INVALID run allowed" in judgement.account_lines[0]


def test_looks_in_the_ledger_of_an_earlier_version_decide_nothing(measured: Workplace) -> None:
    _, authorization = authorize(measured.frozen)
    of_all = RunKey("small", "", 0)
    authorization.ledger._append(of_all, event="look", by="decide", num_sealed=3, keeps_looks=True)
    assert only(decide(measured.sealed)).outcome is Outcome.PASS
    before = measured.git("for-each-ref", "refs/harness")
    assert harness(measured, "table", "small", "--runs", "runs").returncode == 0
    assert measured.git("for-each-ref", "refs/harness") == before, "to look writes nothing"


def test_runs_with_repetitions_left_are_repeated_beside_those_without(place: Workplace) -> None:
    place.allow_retries(1)
    frozen = place.freeze().path
    place.run_confirmatory(frozen, busy=["base/1", "more/2"])
    # base/1 is INVALID again, and the person ends the experiment before more/2.
    place.run_confirmatory(frozen, busy=["base/1"], resume=True, retry_invalid=True, **ends_after_one_run())
    assert "more/2 is INVALID" in only(decide(place.sealed)).reason
    place.run_confirmatory(frozen, resume=True, retry_invalid=True)
    assert [run.label for run in place.sealed if not run.is_valid] == ["base/1"]
    assert only(decide(place.sealed)).outcome is Outcome.PASS
    with pytest.raises(SpecError, match="the 1 repetitions that this freeze allows are used up"):
        place.run_confirmatory(frozen, resume=True, retry_invalid=True)


def test_a_decided_sequence_waits_for_its_invalid_run_too(place: Workplace) -> None:
    with place.experiment_file.open("a") as file:
        file.write(FROZEN_STOP)
    place.allow_retries(1)
    frozen = place.freeze().path
    runs = place.run_confirmatory(frozen, busy=["base/0"], until_decided=True)
    assert len(runs) < 8
    assert decide(place.sealed).decisions[-1].outcome is Outcome.WITHHELD
    again = place.run_confirmatory(frozen, resume=True, retry_invalid=True, until_decided=True)
    assert all(run.is_valid for run in again)
    assert len(again) == len(runs), "no block more than the rule asks for"
    assert decide(place.sealed).decisions[-1].outcome is Outcome.PASS
