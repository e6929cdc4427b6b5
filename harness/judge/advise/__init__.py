"""From sealed baseline runs to a proposal: what the baseline loses, the smallest change that captures the gain.

Nothing here measures or compiles; what it writes is an experiment that would show the proposal wrong.
"""

from __future__ import annotations

from harness.judge.advise.advise import Advice, advise
from harness.judge.advise.diagnose import Diagnosis, diagnose
