"""NPUs as ``rbln-smi -j`` reports them: which exist, who uses them, temperature and power; and units of such figures.

The report is kept raw and read leniently, because keys and types differ between drivers; unreadable values are absent.
A written unit counts; else the magnitude decides, within the limits of such a card, and the unit is marked as assumed.
Nothing is configured or reset.
Source: the vendor's public documentation and public readers of the format; never run on a device. Limits: a card of 4
devices draws some 30 to 300 W, a device is 10 to 110 C warm and holds 16 GB; drivers 3.x use uW and mC internally.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from harness.errors import ServerError

_NUMBER = re.compile(r"-?\d{1,20}(?:\.\d{1,20})?(?:[eE][+-]?\d{1,2})?")
_BYTE_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_POWER_UNITS = {"uw": 1e-6, "µw": 1e-6, "mw": 1e-3, "w": 1.0, "kw": 1e3}
WARMEST_C = 200.0
MOST_W = 2000.0
ASSUMED = " by magnitude"
"""Suffix of a unit that was not written and is not the usual unit: it was assumed from the magnitude."""
_MEMORY_SCALES = (("GiB", 1 << 30, 1 << 10), ("MiB", 1 << 20, 1 << 20), ("KiB", 1 << 10, 1 << 30), ("B", 1, 1 << 50))
"""Unit, its bytes, and the total below which a number without a unit is assumed to be in that unit."""


class Quantity(NamedTuple):
    """A value in the unit of the function, None when unreadable. unit: the unit as read, "" without a value."""

    value: float | None
    unit: str


NOTHING = Quantity(None, "")


def number_of(value: object) -> float | None:
    """The first number in "45C", "23.5 W", 45 or "45"; None without a finite number."""
    match = _NUMBER.search(str(value)[:64]) if value is not None and not isinstance(value, bool) else None
    number = float(match[0]) if match else math.nan
    return number if math.isfinite(number) else None


def temperature_c(value: object) -> Quantity:
    """Degrees Celsius. Sensors of the driver report thousandths."""
    number = number_of(value)
    if number is None:
        return NOTHING
    if abs(number) <= WARMEST_C:
        return Quantity(number, "C")
    return Quantity(number / 1000, f"mC{ASSUMED}") if abs(number) <= WARMEST_C * 1000 else NOTHING


def power_w(value: object) -> Quantity:
    """Watts."""
    number = number_of(value)
    if number is None or number < 0:
        return NOTHING
    written = re.sub(r"[\d.\s+-]", "", str(value)).lower()
    if written in _POWER_UNITS:
        return Quantity(number * _POWER_UNITS[written], written.replace("w", "W"))
    for unit, scale in (("W", 1.0), (f"mW{ASSUMED}", 1e-3), (f"uW{ASSUMED}", 1e-6)):
        if number * scale < MOST_W:
            return Quantity(number * scale, unit)
    return NOTHING


def memory_bytes(used: object, total: object) -> tuple[Quantity, Quantity]:
    """Bytes in use and in total, from "15.7GiB", "512 MB" (2^20 too, as drivers use it), 1024 or "1024".

    Without a written unit the total's magnitude decides for both: 16 are GiB, 16,000 MiB, 16,000,000 KiB.
    """
    total_number = number_of(total)
    guess = next((row for row in _MEMORY_SCALES if total_number is not None and total_number < row[2]), None)
    return _bytes(used, guess), _bytes(total, guess)


def _bytes(value: object, guess: tuple[str, int, int] | None) -> Quantity:
    number = number_of(value)
    if number is None or number < 0:
        return NOTHING
    written = re.sub(r"[\d.\s+-]", "", str(value)).lower()[:1]
    if written in _BYTE_UNITS:
        scale, unit = _BYTE_UNITS[written], "B" if written == "b" else f"{written.upper()}iB"
    else:
        unit, scale, _limit = guess or ("B", 1, 0)
        unit = unit if scale == 1 else f"{unit}{ASSUMED}"
    size = number * scale
    return Quantity(float(int(size)), unit) if size < 1 << 60 else NOTHING


def quantities(
    temperature: object, power: object, used: object, total: object
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Temperature, power and memory of a device by the name of a reading, and the unit that each was read in."""
    warmth, watts, (in_use, size) = temperature_c(temperature), power_w(power), memory_bytes(used, total)
    units = {"temperature": warmth.unit, "card_power": watts.unit, "memory": size.unit or in_use.unit}
    return {
        "temperature_c": warmth.value,
        "card_power_w": watts.value,
        "memory_used_bytes": in_use.value,
        "memory_total_bytes": size.value,
    }, {name: unit for name, unit in units.items() if unit}


COMMANDS = ("rbln-smi", "rbln-stat")
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Device:
    """A logical NPU; None where the driver states no value. card: the board, whose devices share a power meter.

    device: "rbln0"; it and the uuid distinguish two dies of a card. units: the unit in which each quantity was read.
    """

    npu: int
    name: str = ""
    uuid: str = ""
    device: str = ""
    card: str = ""
    status: str = ""
    temperature_c: float | None = None
    card_power_w: float | None = None
    utilisation: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    group: str = ""
    units: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A process that holds a context on a device."""

    npu: int
    pid: int | None
    process: str


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The report of ``rbln-smi -j``. raw: its JSON, for the manifest."""

    kmd_version: str
    devices: tuple[Device, ...]
    uses: tuple[DeviceUse, ...]
    raw: dict[str, Any]

    def users_of(self, devices: Sequence[int]) -> tuple[DeviceUse, ...]:
        return tuple(use for use in self.uses if use.npu in devices)


def find_command() -> tuple[str, ...]:
    """The command that reports this host's devices as JSON; empty when no driver is installed."""
    return next(((path, "-j") for name in COMMANDS if (path := shutil.which(name))), ())


def read_devices(command: Sequence[str] | None = None) -> DeviceReport | None:
    """The report of this host's driver; None without rbln-smi. ServerError when it fails or prints no JSON."""
    words = find_command() if command is None else tuple(command)
    if not words:
        return None
    command_name = words[0]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ServerError(
            f"gives no answer ({type(error).__name__})", where=command_name, hint="Check the driver: rbln-smi"
        ) from error
    if done.returncode:
        message = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise ServerError(
            f"fails with status {done.returncode}: {message[-1]}", where=command_name, hint="Check the driver"
        )
    return parse_devices(done.stdout, where=command_name)


def parse_devices(text: str, *, where: str = "rbln-smi") -> DeviceReport:
    """A report from the command's output; missing keys are absent."""
    try:
        # Some drivers print a header line before the JSON.
        table: Any = json.loads(text[text.index("{") :])
    except (ValueError, RecursionError) as error:
        raise ServerError("its output is not JSON", where=where, hint="Update the driver, or report this") from error
    raw = cast("dict[str, Any]", table)
    # With -g some drivers list the devices below their groups.
    grouped = [
        {"group_id": group.get("group_id", group.get("id")), **row}
        for group in _rows(raw, "groups")
        for row in _rows(group, "devices")
    ]
    devices = [_device(row, place) for place, row in enumerate(_rows(raw, "devices") or grouped)]
    uses = [
        DeviceUse(npu, None if pid is None else int(pid), str(row.get("process") or row.get("name") or ""))
        for row in _rows(raw, "contexts")
        for pid in (number_of(row.get("pid")),)
        for npu in _numbers(row.get("npu", row.get("device")))
    ]
    return DeviceReport(str(raw.get("KMD_version") or raw.get("kmd_version") or ""), tuple(devices), tuple(uses), raw)


def require_idle(devices: Sequence[int], report: DeviceReport | None = None) -> DeviceReport | None:
    """The host's report; ServerError when a chosen device is missing, unhealthy or in use.

    None without rbln-smi: the server itself will then report what is missing.
    """
    report = report if report is not None else read_devices()
    if report is None:
        return None
    known = {device.npu: device for device in report.devices}
    if missing := [npu for npu in devices if npu not in known]:
        raise ServerError(
            f"device {_list(missing)} does not exist; there are {_list(sorted(known)) or 'none'}",
            where="server.devices",
            hint="Choose existing ones",
        )
    if ill := [npu for npu in devices if known[npu].status.lower() not in {"", "normal", "ok", "healthy"}]:
        raise ServerError(
            f"device {ill[0]} reports status {known[ill[0]].status!r}",
            where="server.devices",
            hint="Look at rbln-smi; choose others with server.devices",
        )
    if users := report.users_of(devices):
        who = "; ".join(f"device {use.npu} by pid {use.pid} ({use.process or 'unknown'})" for use in users[:4])
        raise ServerError(
            f"the chosen devices are busy: {who}",
            where="server.devices",
            hint="End that process, or choose others with server.devices",
        )
    return report


def readings(report: DeviceReport) -> list[dict[str, Any]]:
    """Temperature, power, load and memory of every device, for a series through a run."""
    return [
        {
            "device": device.device or device.uuid or f"rbln{device.npu}",
            "npu": device.npu,
            "card": device.card,
            "temperature_c": device.temperature_c,
            "card_power_w": device.card_power_w,
            "utilisation": device.utilisation,
            "memory_used_bytes": device.memory_used_bytes,
            "units": dict(device.units),
        }
        for device in report.devices
    ]


def _device(row: dict[str, Any], place: int) -> Device:
    memory = row.get("memory")
    sizes = cast("dict[str, Any]", memory) if isinstance(memory, dict) else {}
    figures, units = quantities(
        row.get("temperature"),
        row.get("card_power", row.get("power")),
        sizes.get("used", row.get("memory_used")),
        sizes.get("total", row.get("memory_total", memory)),
    )
    npus = _numbers(row.get("npu", row.get("device")))
    return Device(
        npu=npus[0] if npus else place,
        name=str(row.get("name") or ""),
        uuid=str(row.get("uuid") or ""),
        device=str(row.get("device") or ""),
        card=str(row.get("sid") or ""),
        status=str(row.get("status") or ""),
        utilisation=number_of(row.get("util")),
        group=str(row["group_id"]) if row.get("group_id") is not None else "",
        units=tuple(units.items()),
        **figures,
    )


def _rows(table: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The rows below ``key``: a list, or a table by device whose keys become the rows' "device"."""
    rows: Any = table.get(key)
    if isinstance(rows, dict):
        named = cast("dict[str, Any]", rows)
        rows = [{"device": name, **row} for name, row in named.items() if isinstance(row, dict)]
    if not isinstance(rows, list):
        return []
    return [cast("dict[str, Any]", row) for row in cast("list[Any]", rows) if isinstance(row, dict)]


def _numbers(value: object) -> list[int]:
    """Device numbers in 3, "3", "rbln3", "0,1,2,3" or [0, 1]."""
    if isinstance(value, list):
        return [number for item in cast("list[object]", value) for number in _numbers(item)]
    return (
        []
        if value is None or isinstance(value, bool)
        else [int(digits) for digits in re.findall(r"\d{1,6}", str(value)[:256])]
    )


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
