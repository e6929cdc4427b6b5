"""The long differential run: at least a million steps per rule set, fixed seeds, in the twin's Python.

``python -m tests.differential.million [STEPS]``; exit status 0 means no difference. Interrupted, it continues where it
stopped, unless the engine or the comparison has changed since. Next: people read what it prints.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import HarnessError
from harness.twin.artifact import ArtifactSpec, cached_artifact
from harness.twin.environment import find_twin, twin_variables

CHECKOUT = Path(__file__).resolve().parents[2]
MANY_SEEDS = "0:1000000"
LEDGERS = CHECKOUT / "runs" / "differential"


def main(num_steps: str = "1000000") -> int:
    """Compare ``num_steps`` steps for each vllm-rbln version that is installed; 0 when none differs."""
    try:
        twin = find_twin()
    except HarnessError as error:
        sys.exit(f"differential: {error}")
    artifact, clock = cached_artifact(twin, ArtifactSpec()), MonotonicClock()
    worst = 0
    for version in ("0.11.1", "0.11.2"):
        variables = {**os.environ, **twin_variables(), "VLLM_LOGGING_LEVEL": "CRITICAL"}
        paths = [variables["PYTHONPATH"], str(CHECKOUT)]
        if version != "0.11.1":
            if not (twin.other_stack(version) / "complete").is_file():
                print(f"vllm-rbln {version}: not installed (harness twin install --also {version})")
                continue
            paths.insert(0, str(twin.other_stack(version)))
        variables["PYTHONPATH"] = os.pathsep.join(paths)
        ledger = LEDGERS / f"{version}.jsonl"
        arguments = ["--artifact", str(artifact), "--seeds", MANY_SEEDS, "--until-steps", num_steps]
        arguments += ["--rules", f"vendor-{version}", "--ledger", str(ledger), "--progress"]
        began_ns = clock.now_ns()
        print(f"vllm-rbln {version}, rules vendor-{version} (what is done is kept in {ledger}):", flush=True)
        # optimum-rbln 0.11.2 says that the stand-in runtime is of 0.11.1.
        command = [str(twin.python), "-W", "ignore::ImportWarning", "-m", "tests.differential", *arguments]
        try:
            worst = max(worst, subprocess.run(command, cwd=CHECKOUT, env=variables, check=False).returncode)
        except KeyboardInterrupt:
            sys.exit("differential: interrupted; the same command continues")
        print(f"took {(clock.now_ns() - began_ns) / NS_PER_S / 60:.1f} min", flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
