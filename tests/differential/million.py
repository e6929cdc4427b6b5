"""The long differential run: at least a million steps per rule set, fixed seeds, in the twin's Python.

vLLM's own scheduler, of the release that the twin of ``PAGED_TWIN`` holds, is compared with the paged rules, and the
native path of its vllm-rbln with those of that path.
A newer vLLM is compared by its Python files alone, without its libraries: unpack its wheel, and run ``python -m
tests.differential --rules vllm-paged ...`` as ``play_version`` does, with that folder first in PYTHONPATH.
``python -m tests.differential.million [STEPS]``; exit status 0 means no difference.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import HarnessError
from harness.extras.twin.backend import cached_artifact, twin_spec
from harness.extras.twin.environment import find_twin, known_stacks, twin_variables
from harness.stacks.rbln.rules.kv_rules import AUTO, NATIVE, rule_set

CHECKOUT = Path(__file__).resolve().parents[2]
MANY_SEEDS = "0:1000000"
PAGED_TWIN = "0.12.0"
"""The release of vllm-rbln whose twin holds vLLM 0.30.0."""
PAGED_RULES = "vllm-paged-0.30"
"""What that vLLM decides."""
TWIN_RULES = (PAGED_RULES, NATIVE)


def main(num_steps: str = "1000000", *versions: str) -> int:
    """Compare ``num_steps`` steps for each vllm-rbln version and set of paged rules: all installed, or those named.

    0 when none differs; 1 when one differs, when one that was named is not installed, or when nothing was compared.
    """
    statuses: list[int] = []
    for version in versions or [*(stack.version for stack in known_stacks()), *TWIN_RULES]:
        try:
            statuses.append(play_version(version, num_steps))
        except HarnessError as error:
            print(f"{version}: {error}")
            statuses += [1] if versions else []
        except KeyboardInterrupt:
            sys.exit("differential: interrupted")
    if not statuses:
        sys.exit("differential: nothing was compared: no release of vllm-rbln is installed")
    return max(statuses)


def play_version(version: str, num_steps: str) -> int:
    """Compare the rules of one version with its own classes; the exit status. HarnessError: it is not installed."""
    is_paged, clock = version in TWIN_RULES, MonotonicClock()
    twin = find_twin(PAGED_TWIN if is_paged else version)
    rules = version if is_paged else rule_set(AUTO, version).name
    variables = {**os.environ, **twin_variables(twin), "VLLM_LOGGING_LEVEL": "CRITICAL"}
    if is_paged:
        # vLLM alone, without the platform of vllm-rbln.
        variables["VLLM_PLUGINS"] = ""
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(CHECKOUT)])
    arguments = ["--artifact", str(cached_artifact(twin, twin_spec())), "--seeds", MANY_SEEDS]
    arguments += ["--rules", rules, "--until-steps", num_steps]
    print(f"{version}, rules {rules}:", flush=True)
    began_ns = clock.now_ns()
    command = [str(twin.python), "-m", "tests.differential", *arguments]
    status = subprocess.run(command, cwd=CHECKOUT, env=variables, check=False).returncode
    print(f"took {(clock.now_ns() - began_ns) / NS_PER_S / 60:.1f} min", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
