"""What the baseline of sealed runs lost, and the command that searches what would save it. Nothing is simulated."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.clock import NS_PER_S
from harness.errors import HarnessError
from harness.measure.records.run import SealedRun
from harness.tune.diagnose import Diagnosis, diagnose


@dataclass(frozen=True, slots=True)
class Hint:
    """What sealed runs suggest. command: what searches a configuration that loses less."""

    diagnosis: Diagnosis
    command: str

    @property
    def losses(self) -> list[tuple[str, str]]:
        """(kind, words) of what the baseline lost, as far as its records show it."""
        found = self.diagnosis
        if (eager := found.eager) is not None:
            share = f"{eager.count:,}, {100 * eager.count / eager.num_steps:.1f} % of the decode steps"
            captured = f"; server.decode_buckets = {list(eager.sizes)} captures them" if eager.sizes else ""
            return [("Steps without a graph", share + captured)]
        rows = [(loss.kind.capitalize(), f"{loss.percent} of device time; {loss.words}") for loss in found.losses]
        if found.waiting_session_ns is not None:
            waited = found.waiting_session_ns / NS_PER_S
            rows.append(("Prefill blocking", f"{waited:.2f} session seconds behind the prompts of other sessions"))
        return rows

    @property
    def line(self) -> str:
        """One line with the command, or why there is no advice."""
        if self.diagnosis.unknown and self.diagnosis.eager is None:
            return f"no advice: {self.diagnosis.unknown}"
        over = f"overloaded by a factor of {self.diagnosis.overload:.1f}; " if self.diagnosis.overload else ""
        lost = ", ".join(f"{loss.kind} {loss.percent}" for loss in self.diagnosis.losses)
        if self.diagnosis.eager is not None:
            ((kind, words),) = self.losses
            lost = f"{kind.lower()}: {words}"
        return f"next: {over}{self.diagnosis.condition} loses {lost or 'nothing that is known'}: {self.command}"


def hint(sealed: Sequence[SealedRun], source: str | Path = "") -> Hint | None:
    """What the sealed runs of an experiment suggest; None where their baseline has no valid run.

    source: the file of the experiment; default: its name.
    """
    try:
        source = source or sealed[0].spec.name
        if str(source).endswith(".json"):
            # A freeze is no file of an experiment; the folder of its runs is read as one.
            source = sealed[0].path.parents[1]
        return Hint(diagnose(sealed), shlex.join(["harness", "tune", str(source)]))
    except HarnessError:
        # Sealed by another version, or no valid run.
        return None
