"""Several replicas and the router before them, as one server: started, followed, stopped and recorded together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import ServerError, SpecError
from harness.extras.replicas.router_launch import router_launch
from harness.measure.records import layout
from harness.measure.records.findings import finding
from harness.measure.records.manifest import Finding
from harness.measure.server.life import LOOPBACK, LaunchPlan
from harness.measure.server.process import ExitReport, HealthWait, ServerHandle, ServerLog, ServerProcess, free_port
from harness.model.engine.config import requested_settings
from harness.model.spec import ServerSpec
from harness.runner.run import Launch, LaunchOptions

ROUTER = "the router"
_NUMBERED = ("env", "extra_args")
_wall_clock = MonotonicClock()


def launch_replicas(launch: Launch, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
    """The plan of all replicas of ``server`` and of their router, each in a folder of the run. Starts nothing.

    launch: of one server. Of a server that somebody else started the replicas are asked alone.
    """
    if server.url:
        return _attached(launch, server, options)
    members = tuple(_members(launch, server, options))
    router_plan = router_launch(server.routing, [member.endpoint.url for member in members], options.run_folder)
    first, asked = members[0], requested_settings(server)
    return replace(
        first,
        argv=router_plan.argv,
        env=router_plan.env,
        host=router_plan.host,
        port=router_plan.port,
        reached_at=None,
        files=router_plan.files,
        requested={**first.requested, **router_plan.requested, "replicas": server.replicas},
        # What {replica} stands for is shown by each replica's own record.
        effective={**first.effective, **{key: asked[key] for key in _NUMBERED if key in first.effective}},
        findings=tuple(dict.fromkeys(finding for member in members for finding in member.findings)),
        scratch_variable="",
        replicas=members,
        start=partial(ServerGroup, members, router_plan, server.routing.health),
    )


def _attached(launch: Launch, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
    """Of servers that run already: the router, and what each replica shows."""
    alone = server.replica
    router_plan = launch(alone.model_copy(update={"step_log": ""}), options)
    members: list[LaunchPlan] = []
    for number, url in enumerate(server.replica_urls):
        step_log = server.step_log.replace("{replica}", str(number))
        folder = _replica_folder(options, number) if step_log else options.run_folder
        own = alone.model_copy(update={"url": url, "step_log": step_log})
        members.append(launch(own, options._replace(run_folder=folder)))
    return replace(
        router_plan,
        replicas=tuple(members),
        observation=members[0].observation,
        appended=tuple(each for member in members for each in member.appended),
        effective={**router_plan.effective, **({"step_log": server.step_log} if server.step_log else {})},
    )


def _replica_folder(options: LaunchOptions, number: int) -> Path:
    folder = layout.replica_folder(options.run_folder, number)
    with ServerError.on_os_error("cannot be made", where=folder, hint="Free some disk space"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _members(launch: Launch, server: ServerSpec, options: LaunchOptions) -> Iterator[LaunchPlan]:
    if options.device is not None:
        raise SpecError(
            "a device of a fleet has one server, and not several replicas",
            where="server.replicas",
            hint="Leave [fleet] out, or measure one replica on each device",
        )
    if server.ssh:
        raise SpecError("replicas are started on this host", where="server.ssh", hint="Leave server.ssh out")
    ports: set[int] = set()
    for number in range(server.replicas):
        while (port := free_port(LOOPBACK)) in ports:
            pass
        ports.add(port)
        # As in a fleet, each replica has the next devices of its stack.
        own = options._replace(port=port, run_folder=_replica_folder(options, number), device=number)
        yield launch(_numbered(server.replica, number), own)


def _numbered(server: ServerSpec, number: int) -> ServerSpec:
    """The replica's own: {replica} in its environment and arguments is its number."""
    return server.model_copy(
        update={
            "env": {name: text.replace("{replica}", str(number)) for name, text in server.env.items()},
            "extra_args": tuple(word.replace("{replica}", str(number)) for word in server.extra_args),
        }
    )


@dataclass
class ServerGroup(ServerHandle):
    """All replicas and their router as one ``ServerHandle``. The router starts when every replica is healthy."""

    members: Sequence[LaunchPlan]
    router_plan: LaunchPlan
    health: str
    log: ServerLog
    processes: list[ServerProcess] = field(default_factory=list[ServerProcess])
    router: ServerProcess | None = None
    _report: ExitReport | None = None

    def __post_init__(self) -> None:
        # A run always has these files; what each process says is in files of its own.
        self.log.path.touch()
        self.log.stamps_path.touch()
        try:
            for number, member in enumerate(self.members):
                folder = layout.replica_folder(self.log.path.parent, number)
                log = ServerLog(folder / layout.SERVER_LOG, folder / layout.LOG_STAMPS, self.log.clock)
                self.processes.append(_started(member, log))
        except BaseException:
            self.kill()
            raise

    @property
    def named(self) -> Iterator[tuple[str, ServerProcess]]:
        """Every process, with its name."""
        if self.router is not None:
            yield ROUTER, self.router
        for number, process in enumerate(self.processes):
            yield f"replica {number}", process

    @property
    def has_exited(self) -> bool:
        return any(process.has_exited for _name, process in self.named)

    def _waited(self, wanted: HealthWait) -> int:
        """Until every replica and then the router was healthy; all are gone where one was not in time."""
        _host, _port, deadline_s, path, is_stopped = wanted
        began_ns = _wall_clock.now_ns()

        def wait(name: str, process: ServerProcess, launch: LaunchPlan, health: str) -> None:
            left_s = max(1.0, deadline_s - (_wall_clock.now_ns() - began_ns) / NS_PER_S)
            try:
                process.wait_healthy(launch.host, launch.port, deadline_s=left_s, path=health, is_stopped=is_stopped)
            except ServerError as error:
                raise ServerError(f"{name}: {error.what}", where=error.where, hint=error.hint) from error

        try:
            for number, (process, member) in enumerate(zip(self.processes, self.members, strict=True)):
                wait(f"replica {number}", process, member, path)
            if not is_stopped():
                folder = self.log.path.parent
                log = ServerLog(folder / layout.ROUTER_LOG, folder / layout.ROUTER_LOG_STAMPS, self.log.clock)
                self.router = _started(self.router_plan, log)
                self.pid = self.router.pid
                wait(ROUTER, self.router, self.router_plan, self.health)
        except BaseException:
            self.kill()
            raise
        return _wall_clock.now_ns() - began_ns

    def changes(self) -> tuple[Finding, ...]:
        """A finding for every process that has ended by itself."""
        return tuple(
            finding(
                "router-died" if name == ROUTER else "replica-died",
                f"{name} ended during the run with {process.stop().ending}",
                do=f"Read {_log_of(name)}",
            )
            for name, process in self.named
            if process.has_exited
        )

    def stop(self, grace_s: float = 10.0) -> ExitReport:
        """End the router, then all replicas at once; a report of them all."""
        if self._report is None:
            first = [] if self.router is None else [self.router.stop(grace_s)]
            with ThreadPoolExecutor(max(1, len(self.processes))) as pool:
                reports = [*first, *pool.map(partial(ServerProcess.stop, grace_s=grace_s), self.processes)]
            self._report = _together(reports)
        return self._report


def _started(launch: LaunchPlan, log: ServerLog) -> ServerProcess:
    return ServerProcess.start(launch.argv, env=launch.env, log=log, scratch_variable=launch.scratch_variable)


def _log_of(name: str) -> str:
    is_router = name == ROUTER
    return layout.ROUTER_LOG if is_router else f"{layout.REPLICAS}/{name.rsplit(maxsplit=1)[-1]}/{layout.SERVER_LOG}"


def _together(reports: Sequence[ExitReport]) -> ExitReport:
    """One report: the status is that of the first that ended otherwise than asked, else of the first."""
    if not reports:
        return ExitReport(0, None, was_asked=True, killed=(), stop_ns=0, log_bytes=0, is_port_free=None)
    bad = next((report for report in reports if not report.was_asked), reports[0])
    ports = [report.is_port_free for report in reports if report.is_port_free is not None]
    return ExitReport(
        pid=bad.pid,
        returncode=bad.returncode,
        was_asked=all(report.was_asked for report in reports),
        killed=tuple(pid for report in reports for pid in report.killed),
        stop_ns=sum(report.stop_ns for report in reports),
        log_bytes=sum(report.log_bytes for report in reports),
        is_port_free=all(ports) if ports else None,
    )
