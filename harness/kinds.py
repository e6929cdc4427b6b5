"""The table of backends: name, label in reports, abilities. Those of plug-ins are in it too. Nothing is started here.

Specs are checked against it, and reports take their labels from it. A sealed run may name a kind that this version does
not have; it still opens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from enum import Enum

from harness.errors import SpecError
from harness.plugins import BackendKind, plugins

_TABLE = (
    BackendKind(name="emulator", label="embedded emulator (modelled step times, no device)", scales_time=True),
    BackendKind(name="sim", label="virtual time, no server process", scales_time=True, is_virtual=True),
    BackendKind(name="rbln", label="RBLN NPU (vLLM with vllm-rbln)", has_device=True, has_stack=True, lifecycle_s=20.0),
    BackendKind(
        name="vllm",
        label="vLLM (vllm serve of an environment of yours, any platform)",
        has_device=True,
        has_observer=True,
        lifecycle_s=60.0,
    ),
    BackendKind(
        name="attached",
        label="attached server (started by somebody else, not restarted between runs)",
        has_device=True,
        is_restarted=False,
        lifecycle_s=1.5,
    ),
)


class ServingStack(str, Enum):
    """Whose scheduler serves: vLLM's own, or vllm-rbln's."""

    vllm = "vllm"
    rbln = "rbln"


class Kinds(Mapping[str, BackendKind]):
    """The kinds of the table by name, then those of plug-ins, which are looked up when a name is not in the table."""

    def __init__(self, own: Iterable[BackendKind]) -> None:
        self._own = {kind.name: kind for kind in own}

    def __getitem__(self, name: str) -> BackendKind:
        return self._own[name] if name in self._own else self._plugged()[name]

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self._own, *self._plugged()])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @staticmethod
    def _plugged() -> dict[str, BackendKind]:
        return {kind.name: kind for plugin in plugins().usable for kind in plugin.kinds}


KINDS = Kinds(_TABLE)
OWN_KINDS = frozenset(kind.name for kind in _TABLE)
DEFAULT_BACKEND = _TABLE[0].name


def kind_named(name: str) -> BackendKind:
    """The kind that an experiment names; an unknown name is a SpecError that lists the known kinds."""
    if name not in KINDS:
        raise SpecError(f"unknown backend {name!r}", where="backend", hint=f"Use one of {', '.join(KINDS)}")
    return KINDS[name]


def origin_note(name: str, *, is_on_cpu: bool = False, device: str = "") -> str:
    """Where the figures of such a run are from, to stand beside them. is_on_cpu, device: see ``Manifest``."""
    kind = kind_of_run(name)
    if kind.is_virtual:
        return "Predicted: simulated in virtual time; no server ran and no accelerator was measured."
    if kind.has_device is None:
        return f"From a server of kind {kind.label}, which this version does not know."
    if kind.has_device and not kind.is_restarted:
        return "Measured on a server that somebody else started."
    if kind.has_device and is_on_cpu:
        return "Measured on a CPU; no accelerator was measured."
    if kind.has_device:
        shown = f"its device tool reported {device}" if device else "no record shows which device"
        return f"Measured by backend {kind.name}; {shown}."
    what = "On the twin, the real stack" if kind.has_stack else "Emulated"
    return f"{what} with modelled step times; no accelerator was measured."


_EMULATOR = "-emulator"


def kind_of_run(name: str, *, is_emulator: bool = False) -> BackendKind:
    """The kind that a sealed run names; an unknown kind has its name as label, and no known device.

    is_emulator: the server showed itself to be the emulator, whatever started it; such a kind has a name of its own.
    """
    backend = name.removesuffix(_EMULATOR)
    if name not in KINDS and backend in KINDS:
        return kind_of_run(backend, is_emulator=True)
    kind = KINDS.get(name) or BackendKind(name=name, label=name or "not named", has_device=None)
    if not is_emulator or kind.has_device is False:
        return kind
    label = f"emulator (modelled step times, no device), reached as: {kind.label}"
    return replace(kind, name=name + _EMULATOR, label=label, has_device=False, has_stack=False)
