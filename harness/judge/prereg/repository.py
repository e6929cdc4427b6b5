"""A git repository (what is committed, since when, what is not), and signatures of files by ``ssh-keygen``.

Only ``commit``, ``tag``, ``append`` and ``sign_file`` write. They leave the index and other changes alone. Keys are
never read. A file of allowed signers names the holder of each key.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.errors import RecordsError, SpecError
from harness.measure.records.archive import SIGNATURE

TIMEOUT_S = 120.0
MOST_PACK_BYTES = 8 << 20
"""Of an archive's proof: some ten thousand entries of a ledger. What is packed can be a thousand times as large."""
PLACES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
"""Variables that would send git to another repository, as hooks have them."""


class Commit(NamedTuple):
    """One commit. at_s: committer time, seconds since the epoch (UTC). body: its message without the subject."""

    sha: str
    at_s: int
    parents: str
    body: str


class Repository:
    """One working tree. Raises SpecError when ``path`` lies in none."""

    def __init__(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        try:
            root = _git(folder, "rev-parse", "--show-toplevel", hint="Let git read this repository")
        except SpecError as error:
            if "not a git repository" not in error.what:
                raise
            raise SpecError(
                "is in no git repository, so nobody can check what was fixed when",
                where=str(path),
                hint="Keep experiments and frozen files in a git repository: git init",
            ) from None
        self.root = Path(root.strip())

    @classmethod
    def of_pack(cls, commit: str, pack: bytes) -> Repository:
        """A repository of the objects of a pack alone; it ends with the last reference to it.

        git names each object by its content. ``commit`` has no history there. SpecError for what is no pack.
        """
        made = cls.__new__(cls)
        made.root = Path(tempfile.mkdtemp(prefix="harness-proof-"))
        weakref.finalize(made, shutil.rmtree, made.root, ignore_errors=True)
        form = "sha256" if len(commit) == 64 else "sha1"
        _git(made.root, "init", "--quiet", "--bare", "--template=", f"--object-format={form}")
        _git_bytes(made.root, "unpack-objects", "-q", f"--max-input-size={MOST_PACK_BYTES}", content=pack)
        (made.root / "shallow").write_text(f"{commit}\n", encoding="ascii")
        return made

    def pack(self, *names: str) -> bytes:
        """A git pack of these objects, and of nothing that they refer to."""
        found = _git(self.root, "rev-parse", *names)
        return _git_bytes(self.root, "pack-objects", "--stdout", "-q", content=found.encode())

    def point(self, ref: str, sha: str) -> None:
        """Let a reference name a commit."""
        _git(self.root, "update-ref", ref, sha)

    def resolved(self, name: str) -> str:
        """git's name of the object that this one names, e.g. COMMIT:PATH or HEAD^{commit}; "" where there is none."""
        return (_git_if(self.root, "rev-parse", "--verify", "--quiet", name) or "").strip()

    def name_of(self, path: Path) -> str:
        """The name that git gives to the bytes of a file."""
        return _git(self.root, "hash-object", "--no-filters", "--", str(path.absolute())).strip()

    @property
    def git_folder(self) -> Path:
        """Where git keeps what is in no tree."""
        return Path(_git(self.root, "rev-parse", "--absolute-git-dir").strip())

    def relative(self, path: Path) -> str:
        """The path from the root, with forward slashes; SpecError when it lies outside."""
        try:
            return path.resolve().relative_to(self.root.resolve()).as_posix()
        except ValueError as error:
            what = f"lies outside the repository {self.root}"
            raise SpecError(what, where=str(path), hint="Move it inside") from error

    def changes(self) -> list[str]:
        """Paths of the tree that differ from the last commit, untracked ones included."""
        text = _git(self.root, "status", "--porcelain", "--untracked-files=all")
        return [line[3:] for line in text.splitlines()]

    def is_checked_out(self, path: Path) -> bool:
        """Whether the commit that is checked out holds the file as it is, ignored files included."""
        name = self.relative(path)
        held = self.resolved(f"HEAD:{name}")
        return bool(held) and held == _git(self.root, "hash-object", "--", name).strip()

    def commits(self, *which: str) -> list[Commit]:
        """Commits that ``git log`` lists for these arguments, in its order."""
        form = ("-z", "--no-show-signature", "--encoding=none", "--format=%H%n%ct%n%P%n%b")
        fields = (one.split("\n", 3) for one in _git(self.root, "log", *form, *which).split("\0")[:-1])
        return [Commit(sha, int(at_s), parents, body) for sha, at_s, parents, body in fields]

    def commits_of(self, path: str) -> list[Commit]:
        """Every commit on any branch that changed ``path`` (from the root), newest first."""
        return self.commits("--all", "--full-history", "--", path)

    def line_of(self, since: str, ref: str) -> list[Commit]:
        """Commits of a reference that ``since`` does not have, oldest first; none where there is no such reference."""
        return self.commits("--reverse", "--topo-order", _if_there(ref), f"^{since}")

    def past_heads(self, ref: str) -> list[Commit]:
        """Every commit that ``ref`` ever named, as far as the reflog of this repository has it, newest first."""
        return self.commits("--walk-reflogs", _if_there(ref))

    def remotes_with(self, sha: str) -> list[str]:
        """Remote branches, as last fetched or pushed, that contain a commit."""
        names = _git(self.root, "for-each-ref", "--contains", sha, "--format=%(refname:short)", "refs/remotes")
        return sorted(set(names.split()))

    def append(self, ref: str, parent: str, message: str) -> str | None:
        """Add a commit without changes after ``parent`` and move ``ref`` to it; None when another was faster."""
        if (held := self.resolved(ref)) not in ("", parent):
            return None
        arguments = ("commit-tree", f"{parent}^{{tree}}", "-p", parent, "-m", message)
        sha = _git(self.root, *arguments, hint="Let this user write to .git").strip()
        moved = _git_if(self.root, "update-ref", "--create-reflog", ref, sha, held or "0" * len(parent))
        return None if moved is None else sha

    def history(self, *patterns: str) -> str:
        """Every line ever added to files that match ``patterns``, as a patch without context."""
        return _git(self.root, "log", "--all", "-p", "--unified=0", "--no-color", "--format=commit %H", "--", *patterns)

    def commit(self, paths: Sequence[Path], message: str) -> Commit:
        """Commit exactly ``paths``; raises SpecError when git refuses (no identity, a hook)."""
        names = [self.relative(path) for path in paths]
        for arguments in (("add",), ("commit", "--quiet", "-m", message)):
            _git(self.root, *arguments, "--", *names, hint="Commit the files yourself")
        return self.commits_of(names[0])[0]

    def tag_at(self, sha: str) -> str:
        """Annotated or signed tags on a commit, and what git could verify of their signatures; "" without any."""
        form = "%(objecttype) %(refname:short) %(if)%(contents:signature)%(then)signed%(end)"
        tags: list[str] = []
        for line in _git(self.root, "tag", "--points-at", sha, f"--format={form}").splitlines():
            kind, name, signed = line.split(" ")
            if kind == "tag" and signed:
                # git needs the keys of the signers; and a message may only look like a signature.
                is_verified = _git_if(self.root, "verify-tag", name) is not None
                name += "; signed" if is_verified else "; signature not verified"
            tags += [name] if kind == "tag" else []
        return ", ".join(tags)

    def tag(self, name: str, message: str, *, is_signed: bool) -> None:
        """Put an annotated (or signed) tag on the checked-out commit."""
        kind = "-s" if is_signed else "-a"
        _git(self.root, "tag", kind, name, "-m", message, hint="Choose another name or key")

    def check_tag(self, name: str, *, is_signed: bool) -> None:
        """Raise SpecError where git refuses the name or the key of such a tag; no tag is left."""
        self.tag(name, "tried", is_signed=is_signed)
        _git(self.root, "tag", "-d", name)


SEE_WHY = "Run it there to see why"


def _if_there(ref: str) -> str:
    """A reference as a pattern that only it fits: a missing one is then no error, and needs no call of its own."""
    return f"--glob={ref[:-1]}[{ref[-1]}]"


def _git(folder: Path, *arguments: str, hint: str = SEE_WHY) -> str:
    return _git_bytes(folder, *arguments, hint=hint).decode("utf-8", "replace")


def _git_if(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where it ends with an error."""
    try:
        return _git(folder, *arguments)
    except SpecError:
        return None


def _git_bytes(folder: Path, *arguments: str, content: bytes = b"", hint: str = SEE_WHY) -> bytes:
    done = _ran("git", "-C", str(folder), *arguments, content=content)
    if done.returncode:
        raise SpecError(f"git {arguments[0]} failed: {_complaint(done)}", where=str(folder), hint=hint)
    return done.stdout


def _ran(*command: str, content: bytes) -> subprocess.CompletedProcess[bytes]:
    """A command that has ended; SpecError where it cannot be run."""
    # Looking must not write: without the first, status may take the index lock from under somebody's commit. With the
    # second, an object is what its name is the hash of.
    settings = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_REPLACE_OBJECTS": "1", "LC_ALL": "C"}
    variables = {name: value for name, value in os.environ.items() if name not in PLACES} | settings
    try:
        return subprocess.run(
            command, input=content, capture_output=True, check=False, timeout=TIMEOUT_S, env=variables
        )
    except (OSError, subprocess.SubprocessError) as error:
        hint = "Install git, and OpenSSH 8.2 or newer for signatures"
        raise SpecError(f"cannot be run: {error}", where=command[0], hint=hint) from error


def _complaint(done: subprocess.CompletedProcess[bytes]) -> str:
    """Why a command failed, in one line: what git calls fatal, else the last line."""
    text = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
    _, fatal, cause = text.rpartition("fatal: ")
    return " ".join(cause.split()) if fatal else (text or f"exit status {done.returncode}").splitlines()[-1]


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes; SpecError when it cannot be read."""
    with SpecError.on_os_error("cannot be read", where=path, hint="Restore the file"):
        return hashlib.sha256(path.read_bytes()).hexdigest()


NAMESPACE = "harness"


def sign_file(path: Path, key: Path) -> Path:
    """Sign a file with an SSH key (private, or public with its agent); SpecError when that is refused."""
    signature = path.with_name(path.name + SIGNATURE)
    signature.unlink(missing_ok=True)
    done = _ssh_keygen("sign", "-f", str(key), "-n", NAMESPACE, str(path))
    if done.returncode:
        hint = "Name a key made by ssh-keygen -t ed25519"
        raise SpecError(f"did not sign: {_complaint(done)}", where=str(key), hint=hint)
    return signature


def check_signature(path: Path, signature: Path, signers: Path | None = None) -> str:
    """The signer of a file; RecordsError when the signature does not hold.

    signers: a file of allowed signers (see ssh-keygen), to get the name of the signer instead of the key.
    """
    how = ["check-novalidate"]
    if signers is not None:
        listed = _ssh_keygen("find-principals", "-s", str(signature), "-f", str(signers))
        names = "" if listed.returncode else listed.stdout.decode("utf-8", "replace")
        name = next(iter(names.splitlines()), "nobody").strip()
        how = ["verify", "-f", str(signers), "-I", name]
    done = _ssh_keygen(*how, "-n", NAMESPACE, "-s", str(signature), content=path.read_bytes())
    if done.returncode:
        what = f"its signature does not hold ({_complaint(done)})"
        raise RecordsError(what, where=str(path), hint="Restore both from a copy")
    line = done.stdout.decode("utf-8", "replace").strip()
    return line.removeprefix(f'Good "{NAMESPACE}" signature ').removeprefix("for ").removeprefix("with ")


def _ssh_keygen(action: str, *arguments: str, content: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return _ran("ssh-keygen", "-Y", action, *arguments, content=content)
