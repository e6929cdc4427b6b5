"""Preregistration: plans, predictions and criteria fixed in one committed file before anything is measured.

A confirmatory run needs a RunAuthorization. Only an unchanged, committed frozen file, older than the run, gives one.
"""

from __future__ import annotations

from harness.judge.prereg.authorize import authorize, check_sealed_runs
from harness.judge.prereg.freeze import FreezeOptions, freeze
from harness.judge.prereg.frozen import FrozenRule, Preregistration, RunAuthorization
from harness.judge.prereg.judge import Judgement, decide
from harness.judge.prereg.predict import predict_experiment, predict_runs, predictions_for
from harness.judge.prereg.publish import Checked, publish, publish_exploratory
from harness.judge.prereg.publish import check as check_published
