"""The recorder of sessions in an environment of vLLM that the harness does not own: put there, removed, and told how.

Two folders are copied into its site-packages, what vLLM finds last; nothing that is there is changed. Without its
variable the recorder does nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from harness.errors import ServerError, SpecError
from harness.stacks.vllm.step_log import INSIDE

PACKAGE = "vllm_step_log"
INSTALLER = "rbln-harness"
EXAMPLE = "sessions.jsonl"
FILES = {"VLLM_SESSIONS_FILE": EXAMPLE, "VLLM_CORE_STEPS_FILE": "sessions.core_steps.jsonl"}
"""What is written, by its variable: sessions, and beside them the timed steps that tell the costs of a server."""


def records_in(site_packages: Path) -> list[Path]:
    """Folders by which an installed version of the recorder is known."""
    return sorted(site_packages.glob(f"{PACKAGE}-*.dist-info"))


def place_of(environment: Path) -> Path:
    """The site-packages of an environment; ServerError where it has no vLLM."""
    folders = [environment, *sorted(environment.glob("lib/python3.*/site-packages"))]
    if not environment.is_dir():
        raise SpecError("is no folder", where=str(environment), hint="Name the virtual environment that serves")
    for folder in folders:
        if (folder / "vllm" / "__init__.py").is_file():
            return folder
    raise ServerError(
        "has no vLLM", where=str(environment), hint="Name the virtual environment, or the folder that holds vllm"
    )


def install(place: Path) -> list[Path]:
    """Put the recorder there, over an older version of it; what was written."""
    check_ours(place)
    remove(place)
    package, record = place / PACKAGE, place / _record().name
    with SpecError.on_os_error("cannot be written", where=place, hint="Run it as the owner of the environment"):
        shutil.copytree(INSIDE / PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        # Last: with its entry points vLLM finds it.
        made = place / f".{record.name}"
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(_record(), made)
        (made / "INSTALLER").write_text(f"{INSTALLER}\n")
        made.rename(record)
    return [package, record]


def remove(place: Path) -> list[Path]:
    """Remove what ``install`` put there; what was removed."""
    check_ours(place)
    records = records_in(place)
    gone = [*records, *([place / PACKAGE] if records else [])]
    with SpecError.on_os_error("cannot be removed", where=place, hint="Run it as the owner of the environment"):
        for folder in gone:
            shutil.rmtree(folder)
    return gone


def check_ours(place: Path) -> None:
    """Refuse, as ServerError, an environment where something else has the name."""
    records = records_in(place)
    foreign = [each for each in records if _installer(each) != INSTALLER]
    if foreign or (not records and (place / PACKAGE).exists()):
        what = "is there and was not put there by this command"
        where = str(foreign[0] if foreign else place / PACKAGE)
        raise ServerError(what, where=where, hint="Remove it as it was installed, then try again")


def _installer(record: Path) -> str:
    try:
        return (record / "INSTALLER").read_text().strip()
    except OSError:
        return ""


def _record() -> Path:
    return next(INSIDE.glob(f"{PACKAGE}-*.dist-info"))


def serve_lines() -> list[str]:
    """How a server is started that records its sessions, once the recorder is in its environment."""
    return [" ".join([*(f"{variable}={name}" for variable, name in FILES.items()), "vllm serve MODEL"])]


def docker_lines() -> list[str]:
    """The same for a container, whose image stays as it is."""
    return [
        "docker run --gpus all --ipc=host -p 8000:8000 \\",
        f"  -v {INSIDE}:/opt/vllm-recorder:ro -e PYTHONPATH=/opt/vllm-recorder \\",
        '  -v "$PWD/sessions":/sessions \\',
        *(f"  -e {variable}=/sessions/{name} \\" for variable, name in FILES.items()),
        "  vllm/vllm-openai:latest --model MODEL",
    ]


def kubernetes_lines() -> list[str]:
    """The same for a pod: a config map with the recorder, and what its container needs."""
    record = _record()
    files = [f"{PACKAGE}/{path.name}" for path in sorted((INSIDE / PACKAGE).glob("*.py"))]
    files += [f"{record.name}/{path.name}" for path in sorted(record.iterdir())]
    items = [f"      - {{key: {Path(name).name}, path: {name}}}" for name in files]
    return [
        f"kubectl create configmap vllm-recorder --from-file={INSIDE / PACKAGE} --from-file={record}",
        "# in the pod's spec:",
        "  containers:",
        "  - env:",
        "    - {name: PYTHONPATH, value: /opt/vllm-recorder}",
        *(f"    - {{name: {variable}, value: /sessions/{name}}}" for variable, name in FILES.items()),
        "    volumeMounts:",
        "    - {name: recorder, mountPath: /opt/vllm-recorder, readOnly: true}",
        "    - {name: sessions, mountPath: /sessions}",
        "  volumes:",
        "  - name: sessions",
        "    emptyDir: {sizeLimit: 5Gi}",
        "  - name: recorder",
        "    configMap:",
        "      name: vllm-recorder",
        "      items:",
        *items,
    ]
