"""The sessions of an emulated vLLM, in the file that the observer in a real engine core writes, by the same writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.measure.emulator.step_log import in_place, step_log_header
from harness.model.engine import EngineConfig
from harness.model.engine.core import EngineRequest, StepEnd, StepStart
from harness.stacks.vllm.inside.vllm_step_log import OWN_REQUESTS
from harness.stacks.vllm.inside.vllm_step_log.sessions import OWN, Ended, Limits, SessionFile


class SessionRecorder:
    """The requests of one emulated engine. monotonic_ns: an instant of the model as one of the machine's clock.

    Raises OSError where the disk refuses.
    """

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        monotonic_ns: Callable[[int], int] = in_place,
        limits: Limits | None = None,
    ) -> None:
        self._monotonic_ns, self._size = monotonic_ns, config.block_tokens
        self._is_caching = config.prefix_caching
        shown = step_log_header(config, monotonic_ns(0))
        settings = {name: shown[name] for name in ("vllm", "started_ns", "effective", "absent")}
        header = {"engine": 0, "scheduler": "emulated", "block_tokens": self._size, **settings}
        self._file = SessionFile(str(path), header, limits)
        self._numbers: dict[int, int] = {}
        self._num_requests = 0

    def started(self, start: StepStart) -> None:
        """A step began: requests have come, and clients have left."""
        for request in start.arrivals:
            number = self._numbers[request.handle] = self._num_requests
            self._num_requests += 1
            prompt = len(request.prompt)
            instants_ns = (self._monotonic_ns(request.arrival_ns), self._monotonic_ns(request.queued_ns))
            tokens, hashes = (prompt, request.max_tokens), self._hashes(request, prompt)
            self._file.came(number, instants_ns, tokens, hashes, (OWN,) * (OWN_REQUESTS in request.external_id))
        for request in start.aborted:
            self._ended(request, start.start_ns)
        self._file.flush()

    def ended(self, end: StepEnd) -> None:
        """A step is over, and its tokens are drawn."""
        for request in (*end.finished, *end.aborted):
            self._ended(request, end.ends_ns[-1])
        self._file.flush()

    def _ended(self, request: EngineRequest, at_ns: int) -> None:
        number = self._numbers.pop(request.handle, None)
        if number is None:
            return
        admitted, first = (
            None if instant < 0 else self._monotonic_ns(instant)
            for instant in (request.scheduled_ns, request.first_token_ns)
        )
        reason = request.finish_reason or "unknown"
        numbers = (request.cached_tokens, request.num_generated, request.num_preemptions, reason)
        hashes = self._hashes(request, len(request.prompt) + request.num_generated)
        before = min(len(request.prompt) // self._size, len(hashes))
        self._file.ended(number, Ended(admitted, first, self._monotonic_ns(at_ns), *numbers), hashes, before)

    def _hashes(self, request: EngineRequest, num_tokens: int) -> list[int]:
        return request.block_keys[: num_tokens // self._size].tolist() if self._is_caching else []
