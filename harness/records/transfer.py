"""Transfer of sealed runs between records folders: one archive, and each byte is checked before a run is visible.

A run that arrives twice is kept once. A damaged run, or a file outside a run's folder, is refused.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harness.errors import RecordsError
from harness.records import layout
from harness.records.disk import disk_errors, sync, sync_tree
from harness.records.manifest import load_manifest
from harness.records.run import RunKey, SealedRun
from harness.records.writer import set_aside


@dataclass(frozen=True, slots=True)
class Archive:
    """Sealed runs as one tar file. sha256: of ``content``."""

    keys: tuple[RunKey, ...]
    sha256: str
    content: bytes


def packed(runs: Iterable[SealedRun]) -> Archive:
    """An archive of whole runs, each verified before it leaves."""
    stream, keys = io.BytesIO(), list[RunKey]()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as tar:
        for run in runs:
            run.verify()
            tar.add(run.path, arcname="/".join(map(str, run.key)))
            keys.append(run.key)
    content = stream.getvalue()
    return Archive(tuple(keys), hashlib.sha256(content).hexdigest(), content)


def received(root: Path, archive: Archive) -> list[SealedRun]:
    """Its runs, sealed below ``root``; those that lie there already as they were sent are left alone.

    Raises RecordsError when a byte is not as it was sealed, when another run of that name is there, or when the disk
    refuses: then nothing of that run is visible.
    """
    if hashlib.sha256(archive.content).hexdigest() != archive.sha256:
        raise RecordsError(
            "an archive arrived damaged", where=str(root), hint="Continue with --resume: it is sent again"
        )
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        files = {PurePosixPath(member.name): member for member in tar.getmembers() if not member.isdir()}
        if wrong := [path for path, member in files.items() if not member.isreg() or ".." in path.parts]:
            raise RecordsError(f"an archive holds {str(wrong[0])!r}, which is no file of a run", where=str(root))
        return [_received_run(root, key, tar, files) for key in archive.keys]


def _received_run(
    root: Path, key: RunKey, tar: tarfile.TarFile, files: dict[PurePosixPath, tarfile.TarInfo]
) -> SealedRun:
    final, name = layout.run_folder(root, *key), PurePosixPath(*map(str, key))
    partial = final.with_name(f"{final.name}{layout.PARTIAL}")
    with disk_errors(partial):
        if partial.exists():
            set_aside(partial)
        for path, member in files.items():
            if path.is_relative_to(name) and (source := tar.extractfile(member)) is not None:
                target = partial / path.relative_to(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read())
        run = SealedRun(partial, load_manifest(partial / layout.MANIFEST))
        run.verify()
        if run.key != key:
            raise RecordsError(f"an archive calls {run.label} {key.condition}/{key.replicate}", where=str(partial))
        if final.exists() and load_manifest(final / layout.MANIFEST).seal == run.manifest.seal:
            shutil.rmtree(partial)
            return SealedRun(final, run.manifest)
        sync_tree(partial)
        # rename() onto an existing sealed folder fails: it is not empty.
        partial.rename(final)
        sync(final.parent)
    return SealedRun(final, run.manifest)
