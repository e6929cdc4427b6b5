"""``harness server``: emulator, compiled models, patches and NPUs.

No installed file is edited.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from harness.children import own_command
from harness.cli.addresses import BackendOption, SetOption, changes_of, experiment_with, output_option
from harness.cli.terminal import print_folded, print_text, say, terminal
from harness.errors import ExitCode, ServerError, SpecError

EnvironmentOption = Annotated[
    Path | None,
    typer.Option("--environment", "-e", help="Virtual environment that holds vllm-rbln. Default: the one on PATH."),
]
TwinOption = Annotated[bool, typer.Option("--twin", help="The installed twin's environment.")]


def emulator(context: typer.Context) -> None:
    """Start the emulated server in this terminal.

    All its flags: `harness server emulator --help`.

    Example: `harness server emulator --port 8000 --decode-buckets 1,2,4,8`
    """
    command = own_command("harness.measure.emulator.__main__:main", *context.args)
    os.execv(command[0], command)


def patch_status(environment: EnvironmentOption = None, twin: TwinOption = False) -> None:
    """Say which patch an installed vllm-rbln has, and which exist.

    Example: `harness server patch status --environment /opt/vllm`
    """
    from harness.stacks.rbln.launch import patches

    for patch in patches.shipped_patches():
        print_folded(f"patch {patch.path.parent.name}/{patch.name}: for {', '.join(patch.versions)}; {patch.observes}")
    status = patches.patch_status(_site_packages(environment, twin))
    print_folded(f"{status.target}: {status.state} (vllm-rbln {status.version or 'unknown'})")
    print_text(f"  SHA-256 {status.found_sha256 or '-'}")
    for name, value in ({} if status.patch is None else status.patch.hashes).items():
        print_folded(f"  {name} {value}")
    if status.advice:
        print_folded(f"  {status.advice}")


def patch_verify(
    wheels: Annotated[
        list[Path] | None, typer.Argument(help="Wheels of vllm-rbln. Default: what is installed.")
    ] = None,
    environment: EnvironmentOption = None,
    twin: TwinOption = False,
) -> None:
    """Prove that a patch only observes.

    Compares hashes before and after, and the two syntax trees.

    Example: `harness server patch verify vllm_rbln-0.11.1-py3-none-any.whl`
    """
    from harness.stacks.rbln.launch.patches import verify_installed, verify_wheel

    if wheels:
        for wheel in wheels:
            print_folded(f"{wheel.name}: {verify_wheel(wheel)}")
    else:
        print_folded(verify_installed(_site_packages(environment, twin)))


def patch_apply(
    environment: EnvironmentOption = None,
    twin: TwinOption = False,
    output: Annotated[Path | None, output_option("Folder of overlays. Default: the user's cache.")] = None,
) -> None:
    """Make the overlay, a patched copy of the package for PYTHONPATH.

    Runs make their overlay themselves. Example: `harness server patch apply`
    """
    from harness.stacks.rbln.launch.patches import make_overlay, patch_status, require_pristine
    from harness.stacks.rbln.launch.serving import overlay_folder

    site = _site_packages(environment, twin)
    # What is installed decides first, also for a user who has no cache folder.
    require_pristine(patch_status(site))
    overlay = make_overlay(site, output or overlay_folder())
    print_folded(
        f"{overlay.path}: {overlay.num_files} files, {overlay.size_bytes / 2**20:.1f} MiB; installed files untouched"
    )


def patch_check(
    experiment: Annotated[Path, typer.Argument(help="Experiment file; its first condition is run twice.")],
    runs: Annotated[Path, typer.Option(help="Folder for the two runs.")] = Path("runs"),
    backend: BackendOption = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change one key, as `harness run --set` does. Repeatable.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Perform only what is not sealed yet, and compare again.")
    ] = False,
) -> None:
    """Run one plan with and without the patch and the observer, and compare tokens.

    Also measures what observing costs. A vLLM itself (`--backend vllm`) is run with and without its observer.

    Exit code 0 when they are the same, 3 when not. Example:
    `harness server patch check twin-survival --runs runs/check`
    """
    from harness.cli.progress import watched
    from harness.cli.run import ensure_machine_code
    from harness.runner.paired import check_pair, paired_spec, run_paired

    console = terminal()
    asked, _, _ = experiment_with(experiment, changes_of(changes, backend))
    spec = paired_spec(asked, backend)
    check_pair(asked, spec, runs)
    ensure_machine_code(spec)
    with watched(console) as (progress, stop):
        outcome = run_paired(spec, runs, resume=resume, on_progress=progress, stop=stop)
    if outcome is None:
        say(console, "not both runs are sealed; continue with the same command and --resume")
        raise typer.Exit(int(ExitCode.INTERRUPTED))
    for line in outcome.lines:
        say(console, line, markup=False)
    say(console, f"runs: {runs / spec.name}", markup=False)
    raise typer.Exit(int(ExitCode.PASS if outcome.is_same else ExitCode.RUN_INVALID))


def compile_model(
    spec: Annotated[
        Path | None,
        typer.Argument(help="What to compile: a file (TOML) or a shipped name. Without it: list what there is."),
    ] = None,
    output: Annotated[Path, output_option("Folder of artifacts.")] = Path("artifacts"),
    environment: EnvironmentOption = None,
    twin: Annotated[bool, typer.Option("--twin", help="Write a stand-in artifact for the twin.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Hash every file of what is there.")] = False,
    changes: SetOption = None,
) -> None:
    """Compile a model for the NPUs.

    The same specification and versions reuse the same artifact.

    Example: `harness server compile qwen3-4b -o /data/artifacts`
    """

    from harness.model.spec import ServerSpec
    from harness.model.spec.changes import override_table
    from harness.runner.backends import backend_named
    from harness.stacks.rbln.launch.compile import (
        compile_artifact,
        list_artifacts,
        load_compile_spec,
        registered_artifact,
    )

    if spec is None:
        found = list_artifacts(output)
        if not found:
            of = f" --environment {environment}" if environment else " --twin" if twin else ""
            hint = f"Name what to compile: harness server compile qwen3-4b -o {output}{of}"
            raise SpecError("no artifacts there", where=str(output), hint=hint)
        hashed = "; all files as registered" if check else ""
        for folder, record in found:
            if check:
                registered_artifact(folder, check_hashes=True)
            versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
            print_folded(f"{folder}: {_facts(record)}, compiled in {record['seconds']} s by {versions}{hashed}")
        return
    wanted = load_compile_spec(spec, lambda table: override_table(table, changes or []))
    exporter = backend_named("twin" if twin else "rbln").exporter(ServerSpec(environment=str(environment or "")))
    made = compile_artifact(wanted, output, exporter, on_progress=print_text)
    if check:
        registered_artifact(made.folder, check_hashes=True)
    how = "reused" if made.was_reused else f"compiled in {made.record['seconds']} s"
    print_folded(f"{made.folder}: {how}, {_facts(made.record)}")


def _facts(record: Mapping[str, Any]) -> str:
    """ "buckets {1,2,4,8}, 9,216.0 MiB": what a registered artifact is."""
    buckets = ",".join(map(str, sorted(record["spec"]["decoder_batch_sizes"])))
    return f"buckets {{{buckets}}}, {record['size_bytes'] / 2**20:,.1f} MiB"


def devices(
    form: Annotated[
        Literal["text", "json"], typer.Option("--format", help="`json`: the driver's own report.")
    ] = "text",
) -> None:
    """Say which NPUs there are, how they are, and who uses them.

    Example: `harness server devices`
    """

    from harness.stacks.rbln.launch.devices import read_devices

    report = read_devices()
    if report is None:
        raise ServerError("no rbln-smi on PATH", where="devices", hint="Install the RBLN driver (docs/guides/npu.md)")
    if form == "json":
        print_text(json.dumps(report.raw, indent=2))
        return
    print_folded(f"driver {report.kmd_version or 'unknown'}, {len(report.devices)} devices")
    for device in report.devices:
        users = ", ".join(f"pid {use.pid} ({use.process})" for use in report.users_of([device.npu])) or "idle"
        warmth = "?" if device.temperature_c is None else f"{device.temperature_c:g} C"
        power = "?" if device.card_power_w is None else f"{device.card_power_w:g} W card"
        print_folded(f"  {device.npu}: {device.name} {device.status} {warmth} {power}; {users}")


def _site_packages(environment: Path | None, twin: bool) -> Path:
    from harness.plugins import service
    from harness.stacks.rbln.launch.serving import find_rbln_stack

    if twin:
        return service("stand-in stack", where="--twin")()
    return find_rbln_stack(str(environment or "")).site_packages
