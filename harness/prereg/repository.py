"""The git repository that holds experiments and frozen files: what is committed, since when, and what is not.

Only ``commit`` and ``tag`` write, and only what they are given; the index and other people's changes stay as they are.
Next: ``freeze`` and ``ticket`` ask here.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.errors import SpecError

TIMEOUT_S = 60.0


class Commit(NamedTuple):
    """One commit. at_s: committer time, seconds since the epoch (UTC)."""

    sha: str
    at_s: int


class Repository:
    """One working tree. Raises SpecError when ``path`` lies in none."""

    def __init__(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        try:
            self.root = Path(_git(folder, "rev-parse", "--show-toplevel").strip())
        except _GitError as error:
            raise SpecError(
                "is in no git repository, so nobody can check what was fixed when",
                where=str(path),
                hint="Keep experiments and frozen files in a git repository",
            ) from error

    def relative(self, path: Path) -> str:
        """The path from the root, with forward slashes; SpecError when it lies outside."""
        try:
            return path.resolve().relative_to(self.root.resolve()).as_posix()
        except ValueError as error:
            raise SpecError(
                f"lies outside the repository {self.root}", where=str(path), hint="Move it inside"
            ) from error

    def changes(self, *paths: Path) -> list[str]:
        """Paths that differ from the last commit, untracked ones included; all of the tree without ``paths``."""
        names = [self.relative(path) for path in paths]
        text = _git(self.root, "status", "--porcelain", "--untracked-files=all", "--", *names)
        return [line[3:] for line in text.splitlines()]

    def head(self) -> str | None:
        """The commit that is checked out; None before the first one."""
        try:
            return _git(self.root, "rev-parse", "--verify", "HEAD").strip()
        except _GitError:
            return None

    def last_commit_of(self, path: Path) -> Commit | None:
        """The last commit that changed ``path``; None when it was never committed."""
        if self.head() is None:
            return None
        text = _git(self.root, "log", "-1", "--format=%H %ct", "--", self.relative(path)).split()
        return Commit(text[0], int(text[1])) if text else None

    def history(self, *patterns: str) -> str:
        """Every line ever added to files that match ``patterns``, as a patch without context."""
        if self.head() is None:
            return ""
        return _git(self.root, "log", "--all", "-p", "--unified=0", "--no-color", "--format=commit %H", "--", *patterns)

    def commit(self, paths: Sequence[Path], message: str) -> Commit:
        """Commit exactly ``paths``; raises SpecError when git refuses (no identity, a hook)."""
        names = [self.relative(path) for path in paths]
        try:
            _git(self.root, "add", "--", *names, may_write=True)
            _git(self.root, "commit", "--quiet", "-m", message, "--", *names, may_write=True)
        except _GitError as error:
            raise SpecError(
                f"git did not commit: {error}", where=str(self.root), hint="Commit the files yourself"
            ) from error
        found = self.last_commit_of(paths[0])
        assert found is not None, "git has just committed it"
        return found

    def tag_at(self, sha: str) -> str:
        """Annotated or signed tags on a commit, "; signed" behind a signed one; "" without any."""
        names = _git(self.root, "tag", "--points-at", sha, "--format=%(objecttype) %(refname:short)").splitlines()
        annotated = [line.partition(" ")[2] for line in names if line.startswith("tag ")]
        return ", ".join(name + ("; signed" if self._is_signed(name) else "") for name in annotated)

    def _is_signed(self, tag: str) -> bool:
        content = _git(self.root, "cat-file", "tag", tag)
        return any(f"-----BEGIN {kind}-----" in content for kind in ("PGP SIGNATURE", "SSH SIGNATURE"))

    def tag(self, name: str, message: str, *, is_signed: bool) -> None:
        """Put an annotated (or signed) tag on the checked-out commit."""
        try:
            _git(self.root, "tag", "-s" if is_signed else "-a", name, "-m", message, may_write=True)
        except _GitError as error:
            raise SpecError(f"git did not make the tag {name!r}: {error}", hint="Choose another name or key") from error


class _GitError(Exception):
    """git ended with an error; the text is its last line."""


def _git(folder: Path, *arguments: str, may_write: bool = False) -> str:
    # Looking must not write: without this, status may take the index lock from under somebody's commit.
    locks = {} if may_write else {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            env={**os.environ, **locks},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise _GitError(str(error)) from error
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise _GitError(lines[-1] if lines else f"exit status {done.returncode}")
    return done.stdout.decode("utf-8", "replace")


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes; SpecError when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise SpecError(f"cannot be read ({error.strerror})", where=str(path), hint="Restore the file") from error
