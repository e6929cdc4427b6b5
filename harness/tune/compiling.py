"""The compiled models of a tune's candidates: which models serve them, how long a compile takes, and the compile.

They are compiled as ``harness server compile`` does it, into a folder of the tune. A model with a record is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, SpecError
from harness.model.spec import ServerSpec
from harness.runner.backends import backend_named
from harness.stacks.rbln.launch.artifacts import check_artifact
from harness.stacks.rbln.launch.compile import (
    GIB,
    RECORD_FILE,
    CompilerFailedError,
    CompileSpec,
    Exporter,
    compile_artifact,
    list_artifacts,
    read_record,
    registered_artifact,
    require_fresh,
)
from harness.tune.setups import Baseline, Setup

Say = Callable[[str], None]
FOLDER = "artifacts"
ROOM = 4
"""Free disk that a compile needs, in sizes of today's model: weights, their copies, and the artifact."""
VARIED = ("batch_size", "decoder_batch_sizes", "kvcache_num_blocks")
"""What candidates differ in; everything else of a compile is as today's model has it."""


@dataclass(frozen=True)
class Compiler:
    """Compiles models like the one that runs today. today: its specification. root: folder of the tune's models."""

    base: Baseline
    today: CompileSpec
    slots_per_seq: int
    exporter: Exporter
    root: Path

    @classmethod
    def of(cls, backend: str, base: Baseline, root: Path) -> Compiler:
        """SpecError where nothing says what today's model was compiled from, ServerError without a compiler here."""
        exporter = backend_named(backend).exporter(base.server)
        folder = Path(base.server.artifact)
        if read_record(folder) is None:
            raise SpecError(
                f"has no {RECORD_FILE}, so nobody knows what it was compiled from",
                where=str(folder),
                hint="`harness server compile` writes that record",
            )
        there = registered_artifact(folder)
        today = CompileSpec.from_table(there.record.get("spec", {}), where=str(folder / RECORD_FILE))
        exporter = replace(exporter, free_gib=ROOM * there.record["size_bytes"] / GIB)
        return cls(base, today, there.config.slots_per_seq, exporter, root)

    def serving(self, setup: Setup) -> Path | None:
        """A model that is there and serves this configuration: today's, one beside it, or one of the tune."""
        for folder, _, _ in self._models():
            with suppress(HarnessError):
                require_fresh(folder, self.exporter.versions)
                check_artifact(registered_artifact(folder).config, self._server(setup), str(folder))
                return folder
        return None

    def needed(self, setups: Mapping[str, Setup], say: Say) -> float:
        """Say of each candidate which model serves it, or what its compile takes; seconds of all, of those known."""
        total_s = 0.0
        for name, setup in setups.items():
            if there := self.serving(setup):
                say(f"{name}: {setup.label} is served by {there}")
                continue
            total_s += self.seconds(setup)
            say(f"{name}: {setup.label} has to be compiled{self.time_of(setup)}")
        return total_s

    def made(self, setups: Mapping[str, Setup], say: Say) -> tuple[dict[str, str], str]:
        """The folder of each candidate's model, compiled where it is not there, and why one has none.

        A model that the stack refuses, or at which the compiler fails, is left out. What the machine lacked raises its
        error: it may be mended.
        """
        places: dict[str, str] = {}
        reason = ""
        # Most memory first: that model serves fewer slots too.
        for name, setup in sorted(setups.items(), key=lambda each: -(each[1].kv_slots or 0)):
            try:
                places[name] = str(self.serving(setup) or self._compiled(setup, say))
            except (SpecError, CompilerFailedError) as error:
                reason = f"{name} is not measured: {error}; of a model compiled elsewhere: --candidate {name}=FOLDER"
                say(reason)
        return places, reason

    def time_of(self, setup: Setup) -> str:
        """What a compile takes, in words that follow others."""
        seconds = self.seconds(setup)
        if not seconds:
            return "; a compile of this model was not timed here: minutes to hours, counted in the budget"
        return f"{about(seconds)} by earlier compiles of this model"

    def seconds(self, setup: Setup) -> float:
        """How long a compile takes, by the slowest known one per graph; 0 where none was timed."""
        # A graph a size, and one for prompts.
        known = (record.get("seconds", 0) / (len(spec.decoder_batch_sizes) + 1) for _, spec, record in self._models())
        return (len(setup.decode_buckets) + 1) * max(known, default=0.0)

    def _compiled(self, setup: Setup, say: Say) -> Path:
        varied: dict[str, Any] = {
            "batch_size": setup.max_num_seqs,
            "decoder_batch_sizes": setup.decode_buckets,
            "kvcache_num_blocks": self._server(setup).physical_slots(self.slots_per_seq),
        }
        spec = CompileSpec.from_table({**self.today.model_dump(), **varied}, where="compile")
        made = compile_artifact(spec, self.root, self.exporter, on_progress=say)
        say(f"compiled in {made.record['seconds']} s: {made.folder}")
        return made.folder

    def _server(self, setup: Setup) -> ServerSpec:
        return self.base.server.model_copy(update=self.base.keys(setup))

    def _models(self) -> Iterator[tuple[Path, CompileSpec, dict[str, Any]]]:
        """Models with a record that differ from today's in what candidates differ in, if in anything; today's first."""
        today = Path(self.base.server.artifact).absolute()
        there = [*list_artifacts(today.parent), *list_artifacts(self.root.absolute())]
        for folder, record in sorted(there, key=lambda each: each[0] != today):
            with suppress(HarnessError, KeyError, TypeError):
                spec = CompileSpec.from_table(record["spec"], where="")
                if _fixed(spec) == _fixed(self.today):
                    yield folder, spec, record


def about(seconds: float) -> str:
    """A forecast, in words that follow others."""
    if not seconds:
        return ", in virtual time"
    return f", about {seconds:.0f} s" if seconds < 120 else f", about {seconds / 60:.0f} min"


def _fixed(spec: CompileSpec) -> dict[str, Any]:
    """The keys of a compile that are the same for today's model and the candidates'."""
    return {key: value for key, value in spec.exported().items() if key not in VARIED}
