"""``python -m tests.faults CAMPAIGN NUMBER [SEED]``, a campaign of ``CAMPAIGNS``; exit code 1 when one was wrong."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from pathlib import Path

from tests.faults.disks import disks
from tests.faults.kills import kills
from tests.faults.tunes import device_tunes, tunes

CAMPAIGNS = {
    "kills": kills,
    "disks": disks,
    "tunes": tunes,
    "device-tunes": device_tunes,
}


def main(what: str, number: int, seed: int) -> int:
    """0 when nothing was lost, half, left over, or said in more than a line."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    fell, found = CAMPAIGNS[what](number, folder, random.Random(seed))
    shutil.rmtree(folder, ignore_errors=True)
    kinds = ", ".join(f"{count} {kind}" for kind, count in fell.most_common())
    print(f"{fell.total()} {what} ({kinds}), seed {seed}: {len(found)} faults")
    for one in found:
        print(one)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else random.randrange(1 << 30)))
