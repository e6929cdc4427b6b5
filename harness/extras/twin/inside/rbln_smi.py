"""A stand-in for ``rbln-smi -j``: idle devices, as many as the twin's settings claim, with the vendor's JSON keys.

Nothing is measured; temperature and power are constants.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

CARD_DEVICES = 4
MEMORY_BYTES = 16_857_956_352


def report(num_devices: int, name: str) -> dict[str, object]:
    """The table that the driver's command prints for ``num_devices`` idle devices."""
    return {
        "KMD_version": "0.0.0-twin",
        "devices": [
            {
                "npu": npu,
                "name": name,
                "sid": f"TWIN{npu // CARD_DEVICES:04d}",
                "uuid": f"00000000-0000-0000-0000-{npu:012d}",
                "device": f"rbln{npu}",
                "status": "normal",
                "fw_ver": "0.0.0",
                "pci": {"dev": "0x1250", "bus_id": f"0000:{npu:02x}:00.0", "numa_node": "0", "link_width": "16"},
                "temperature": "35C",
                "card_power": "60.0W",
                "pstate": "P14",
                "memory": {"used": "0.0B", "total": f"{MEMORY_BYTES}B"},
                "util": "0.0",
            }
            for npu in range(num_devices)
        ],
        "contexts": [],
    }


def main() -> None:
    """Print the report for the settings named in the environment, or for the defaults."""
    path = os.environ.get("RBLN_TWIN_SETTINGS", "")
    settings = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    json.dump(report(settings.get("num_npus", 16), settings.get("npu_name", "RBLN-CA25")), sys.stdout)


if __name__ == "__main__":
    main()
