"""What packages add to the harness: commands, backends, formats of exports and recordings, analyses and rules.

A package names a ``Plugin`` in an entry point of the group ``rbln_harness.plugins``; the harness's own extras do the
same. A part is named by its place, "package.module:attribute", and imported at first use. A plug-in that does not load
is left out, and ``harness doctor`` says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.errors import SpecError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


GROUP = "rbln_harness.plugins"
Parts = Mapping[str, str]
"""Places of parts, by the name under which users ask for them."""


@dataclass(frozen=True, slots=True)
class BackendKind:
    """One kind of server, as experiments and sealed runs name it.

    label: in reports, so that no reader confuses two kinds. has_device: its times come from a device; None: unknown.
    scales_time: model time may differ from wall time. is_virtual: no process is started and no wall time passes.
    has_stack: the real vllm-rbln, which can be patched and observed. has_observer: it can be observed alone.
    is_restarted: every run gets a fresh server.
    lifecycle_s: wall seconds of a run besides its replay, a first estimate.
    """

    name: str
    label: str
    has_device: bool | None = False
    scales_time: bool = False
    is_virtual: bool = False
    has_stack: bool = False
    has_observer: bool = False
    is_restarted: bool = True
    lifecycle_s: float = 2.5


@dataclass(frozen=True, slots=True)
class Plugin:
    """What one package adds. Every value of a mapping is a place, "package.module:attribute".

    name: as ``harness doctor`` lists it. summary: what it adds, in one line. commands: functions by the command's
    words, e.g. "paper tables". groups: help of a group of commands that is new with it, by its words. kinds: facts of
    its backends. backends: a ``Backend`` for each kind. export_formats: a ``Format``. trace_formats: a ``TraceFormat``.
    analyses: an ``Analysis``. rules: a kind of rules, as a subclass of ``DecisionRule``. result_files: readers of other
    benchmarks' results, from paths to a ``PeerSide`` or None. services: what the core asks for by name and does
    without: see ``service``. doctor: functions that give lines of ``harness doctor``.
    """

    name: str
    summary: str
    commands: Parts = field(default_factory=dict[str, str])
    groups: Parts = field(default_factory=dict[str, str])
    kinds: tuple[BackendKind, ...] = ()
    backends: Parts = field(default_factory=dict[str, str])
    export_formats: Parts = field(default_factory=dict[str, str])
    trace_formats: Parts = field(default_factory=dict[str, str])
    analyses: Parts = field(default_factory=dict[str, str])
    rules: Parts = field(default_factory=dict[str, str])
    result_files: Parts = field(default_factory=dict[str, str])
    services: Parts = field(default_factory=dict[str, str])
    doctor: Parts = field(default_factory=dict[str, str])


class Unusable(NamedTuple):
    """A plug-in that did not load, the package that it is from, and why."""

    name: str
    package: str
    why: str


class Plugins(NamedTuple):
    """Every installed plug-in, in the order of names, and those that did not load."""

    usable: tuple[Plugin, ...]
    unusable: tuple[Unusable, ...]


@cache
def plugins() -> Plugins:
    """The plug-ins of this environment; each is imported once, its parts are not."""
    from importlib.metadata import entry_points

    usable: list[Plugin] = []
    unusable: list[Unusable] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            usable.append(_loaded(entry))
        except KeyboardInterrupt:
            raise
        # A plug-in is other people's code: whatever it raises, the harness goes on without it.
        except BaseException as error:
            package = "" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
            unusable.append(Unusable(entry.name, package, _in_a_line(error)))
    return Plugins(tuple(usable), tuple(unusable))


def _loaded(entry: EntryPoint) -> Plugin:
    plugin = entry.load()
    if not isinstance(plugin, Plugin):
        raise TypeError(f"{entry.value} is a {type(plugin).__name__}, not a harness.plugins.Plugin")
    return plugin


def _in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def part_at(place: str) -> Any:
    """The object at "package.module:attribute"; SpecError that names the place where it does not load."""
    module, _, attribute = place.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise SpecError(
            f"this part of a plug-in does not load ({_in_a_line(error)})",
            where=place,
            hint="`harness doctor` lists the plug-ins; install what it lacks, or remove its package",
        ) from error


def plugged(parts: str) -> dict[str, str]:
    """Places of all parts of one sort, e.g. "export_formats", by name; the first plug-in that has a name keeps it."""
    places: dict[str, str] = {}
    for plugin in plugins().usable:
        for name, place in getattr(plugin, parts).items():
            places.setdefault(name, place)
    return places


def service(name: str, where: str) -> Any:
    """The service of that name that a plug-in offers; SpecError with ``where`` where none does.

    "stand-in stack": a function that gives the packages of a stack that stands in for one with a compiler, as a
    folder; "server over ssh": an ``OtherHost`` (``stacks.rbln.launch``);
    "fleet over hosts": a function as ``runner.fleet.driver.perform_on_devices``; "replicas": a ``Replicas``
    (``runner.backends.base``); "routing of runs": from valid sealed runs to a list of ``Routing``
    (``present.report.routing``); "simulation cases": a function from a file to printed results; "verdict of a
    recording": from its path, lines on how far predictions of the recorded server hold; "timed steps of a recording":
    from its path, the file of steps beside it, or None; "search space": the specification of a file of a search.
    """
    places = plugged("services")
    if name not in places:
        raise SpecError(f"no plug-in offers {name!r}", where=where, hint="`harness doctor` lists the plug-ins")
    return part_at(places[name])


class Registry(Mapping[str, Any]):
    """The core's own parts of one sort by name, then those of plug-ins; a part of a plug-in is imported when asked for.

    parts: the field of ``Plugin``. The core's names come first and cannot be taken.
    """

    def __init__(self, parts: str, own: Mapping[str, Any]) -> None:
        self._parts = parts
        self._own = dict(own)

    def __getitem__(self, name: str) -> Any:
        if name in self._own:
            return self._own[name]
        return part_at(plugged(self._parts)[name])

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in plugged(self._parts)

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from (name for name in plugged(self._parts) if name not in self._own)

    def __len__(self) -> int:
        return sum(1 for _ in self)
