"""vLLM's own code for captured sizes and graphs, read from the files of a release, without its libraries.

The functions are cut out of their modules unchanged and run with stand-ins for what surrounds them: configurations are
plain namespaces, and nothing touches a device.
"""

from __future__ import annotations

import ast
import enum
import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from harness.stacks.vllm.graph_rules import GraphFlags, graphs_of

SUPPORTS = ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
METHODS = ("ngram", "ngram_gpu", "eagle", "eagle3", "mtp", "draft_model", "suffix", "medusa", "dflash")
# What surrounds a function cut out of a class.
_DUNDER = {"__name__": __name__, "__builtins__": __builtins__}


class Support(enum.Enum):
    NEVER, UNIFORM_SINGLE_TOKEN_DECODE, UNIFORM_BATCH, ALWAYS = range(4)


@dataclass(frozen=True)
class Descriptor:
    """As ``BatchDescriptor`` of a V1 batch."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


class Answer(NamedTuple):
    """Graphs, with their tokens. uniform: of n requests that verify all drafts, from n = 1 on. mixed: of
    ``mixed_tokens``, of two requests, one of which has a token. short: of ``short_batches``."""

    sizes: list[int]
    mode: str
    uniform: list[tuple[str, int]]
    mixed: list[tuple[str, int]]
    short: list[tuple[str, int]]


def mixed_tokens(flags: GraphFlags) -> range:
    """Tokens of batches of two requests with different numbers of them."""
    return range(3, 2 * flags.query * flags.limits[0] + 1 if flags.limits[0] > 1 else 3, 3)


def short_batches(flags: GraphFlags) -> list[tuple[int, int]]:
    """Requests, and the tokens of each, of batches with fewer drafts than the server's most."""
    return [(n, length) for length in range(1, flags.query, 2) for n in range(1, flags.limits[0] + 1, 3)]


def answer_of_rules(flags: GraphFlags) -> Answer:
    """What the harness's rules say; ValueError where no server would start."""
    graphs, query = graphs_of(flags), flags.query
    return Answer(
        list(graphs.sizes),
        graphs.mode,
        [graphs.uniform(n, query) for n in range(1, flags.limits[0] + 1)],
        [graphs.graph_of(tokens) for tokens in mixed_tokens(flags)],
        [graphs.uniform(n, length) for n, length in short_batches(flags)],
    )


def differing(vllm: VllmGraphs, flags: GraphFlags) -> str:
    """How the rules differ from that vLLM for these flags; "" where they do not."""
    sides: list[Any] = []
    for answer in (vllm.answer, answer_of_rules):
        try:
            sides.append(answer(flags))
        except (ValueError, AssertionError) as error:
            sides.append(f"does not start: {error}")
    theirs, ours = sides
    is_same = theirs == ours if isinstance(theirs, Answer) else isinstance(ours, str)
    return "" if is_same else f"{flags}\nvLLM:  {theirs}\nrules: {ours}"


def cut_out(file: Path, owner: str, wanted: Sequence[str], names: dict[str, Any]) -> type:
    """A class of a module with only these of its methods; its constructor takes any attribute.

    names: what the methods find around them.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    of = next(node for node in tree.body if getattr(node, "name", "") == owner)
    assert isinstance(of, ast.ClassDef)
    body = [node for node in of.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    made: Any = ast.parse(f"class {owner}(SimpleNamespace): pass").body[0]
    made.body = body
    names["SimpleNamespace"] = SimpleNamespace
    _run([made], names)
    return names[owner]


def _run(body: list[Any], names: dict[str, Any]) -> None:
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.Module(body=[future, *body], type_ignores=[])
    exec(compile(ast.fix_missing_locations(module), "cut out", "exec"), names)


class VllmGraphs:
    """The functions of one release. folder: holds ``vllm``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names: dict[str, Any] = {**_DUNDER, "enum": enum, "itertools": itertools, "replace": replace}
        names |= {"product": itertools.product, "groupby": itertools.groupby, "defaultdict": defaultdict}
        names |= {"logger": mock.MagicMock(), "BatchDescriptor": Descriptor, "HAS_TRITON": True}
        names["envs"] = SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=None)
        names["current_platform"] = SimpleNamespace(is_unspecified=lambda: False, is_rocm=lambda: False)
        names |= {"Any": Any, "NamedTuple": NamedTuple, "dataclass": dataclass, "VllmConfig": object}
        names |= {"AbstractSet": frozenset, "round_up": lambda value, to: -(-value // to) * to}
        names["get_captured_lora_counts"] = None
        self.names = names
        for place, wanted in {
            "config/compilation": ("CUDAGraphMode",),
            "v1/spec_decode/dynamic/utils": (
                "validate_and_normalize_dynamic_sd_schedule",
                "build_dynamic_sd_schedule_lookup",
            ),
            "v1/cudagraph_dispatcher": ("CudagraphDispatcher",),
            "v1/worker/gpu/cudagraph_utils": ("BatchExecutionDescriptor", "_is_compatible"),
            "v1/worker/utils": ("is_uniform_query_len", "get_uniform_decode_token_count"),
        }.items():
            self._define(place, wanted)
        names["CompilationMode"] = SimpleNamespace(VLLM_COMPILE=3, STOCK_TORCH_COMPILE=1)
        self._config = self._methods(
            "config/vllm",
            "VllmConfig",
            *("_set_cudagraph_sizes", "uniform_decode_query_len", "_maybe_override_dynamic_sd_cudagraph_mode"),
            *("use_v2_model_runner", "_get_v2_model_runner_unsupported_features", "_maybe_disable_dynamic_sd_for_v1"),
        )
        self._compilation = self._methods(
            "config/compilation",
            "CompilationConfig",
            *("resolve_cudagraph_mode_and_sizes", "adjust_cudagraph_sizes_for_spec_decode"),
        )
        self._manager = self._methods(
            "v1/worker/gpu/cudagraph_utils", "CudaGraphManager", "_init_candidates", "dispatch"
        )

    def answer(self, flags: GraphFlags) -> Answer:
        """What this release decides for those flags; ValueError or AssertionError as it raises them itself."""
        names, query = self.names, flags.query
        config = self._vllm_config(flags)
        with mock.patch.dict(sys.modules, self._modules(flags)):
            if getattr(self._config, "_maybe_disable_dynamic_sd_for_v1", None):
                config._maybe_disable_dynamic_sd_for_v1()
            config._maybe_override_dynamic_sd_cudagraph_mode()
            compilation, drafts = config.compilation_config, config.speculative_config
            if drafts is not None and drafts.uses_dynamic_speculative_decoding():
                # As the scheduler does, whatever is captured.
                table, most = drafts.num_speculative_tokens_per_batch_size, drafts.num_speculative_tokens
                names["build_dynamic_sd_schedule_lookup"](table, flags.limits[0], most)
            if flags.enforce_eager:
                compilation.cudagraph_mode = names["CUDAGraphMode"].NONE
            config._set_cudagraph_sizes()
            support, on_v2 = Support[flags.attention_support], config.use_v2_model_runner
            mode = compilation.resolve_cudagraph_mode_and_sizes(
                support, "backend", query, use_v2_model_runner=on_v2, is_profiling=True
            )
            dispatch = self._v2(config, mode) if on_v2 else self._v1(config, mode)
            num_seqs = config.scheduler_config.max_num_seqs
            uniform = [dispatch(n, n * query, query) for n in range(1, num_seqs + 1)]
            mixed = [dispatch(2, tokens, tokens - 1) for tokens in mixed_tokens(flags)]
            short = [dispatch(n, n * length, length) for n, length in short_batches(flags)]
        return Answer(list(compilation.cudagraph_capture_sizes), mode.name, uniform, mixed, short)

    def _v1(self, config: Any, mode: Any) -> Any:
        names = self.names
        dispatcher = names["CudagraphDispatcher"](config)
        dispatcher.initialize_cudagraph_keys(mode, config.uniform_decode_query_len)
        query = config.uniform_decode_query_len

        def dispatch(num_requests: int, num_tokens: int, longest: int) -> tuple[str, int]:
            is_uniform = longest == query and num_tokens == query * num_requests
            graph, descriptor = dispatcher.dispatch(num_tokens, uniform_decode=is_uniform)
            return graph.name, descriptor.num_tokens

        return dispatch

    def _v2(self, config: Any, mode: Any) -> Any:
        names = self.names
        manager = self._manager(
            vllm_config=config,
            compilation_config=config.compilation_config,
            cudagraph_mode=mode,
            max_num_reqs=config.scheduler_config.max_num_seqs,
            decode_query_len=config.uniform_decode_query_len,
            varlen_decode=False,
            ubatch_runner=None,
            lora_capture_cases=[0],
            _candidates={},
            _capture_descs={},
            _graphs_captured=True,
            _lora_dispatch_map={},
            _resolve_effective_loras=lambda number: number,
            _maybe_ubatch_twin=lambda _descriptor: None,
        )
        manager._init_candidates()

        def dispatch(num_requests: int, num_tokens: int, longest: int) -> tuple[str, int]:
            query = names["get_uniform_decode_token_count"](num_requests, num_tokens, longest, True)
            done = manager.dispatch(num_requests, num_tokens, query, 0)
            return done.cg_mode.name, done.num_tokens

        # 0.30 asks whether there is a prompt, later releases whether there is none that matters.
        if "has_prefill" in names["get_uniform_decode_token_count"].__code__.co_varnames:
            original = names["get_uniform_decode_token_count"]
            names["get_uniform_decode_token_count"] = lambda n, tokens, longest, _eligible: original(
                n, tokens, longest, False
            )
        return dispatch

    def _vllm_config(self, flags: GraphFlags) -> Any:
        modes = self.names["CUDAGraphMode"]
        num_seqs, budget = flags.limits
        table = flags.num_speculative_tokens_per_batch_size
        drafts = None
        if flags.num_speculative_tokens:
            drafts = SimpleNamespace(
                method=flags.method,
                num_speculative_tokens=flags.num_speculative_tokens,
                num_speculative_tokens_per_batch_size=None if table is None else [tuple(row) for row in table],
                parallel_drafting=False,
                enable_adaptive_verification=False,
            )
            drafts.uses_dynamic_speculative_decoding = lambda: drafts.num_speculative_tokens_per_batch_size is not None
        given = flags.cudagraph_capture_sizes
        compilation = self._compilation(
            cudagraph_mode=modes[flags.cudagraph_mode],
            cudagraph_capture_sizes=None if given is None else list(given),
            max_cudagraph_capture_size=flags.max_cudagraph_capture_size,
            mode=self.names["CompilationMode"].VLLM_COMPILE,
            compile_sizes=[],
            cudagraph_specialize_lora=True,
            use_inductor_graph_partition=False,
            pass_config=SimpleNamespace(enable_sp=False),
            splitting_ops=["attention"],
            splitting_ops_contain_attention=lambda: True,
            is_attention_compiled_piecewise=lambda: True,
            post_init_cudagraph_sizes=lambda: None,
        )
        self.names["envs"].VLLM_USE_V2_MODEL_RUNNER = None if flags.runner is None else flags.runner == "v2"
        return self._config(
            model_config=SimpleNamespace(
                enforce_eager=flags.enforce_eager, logits_processors=None, architectures=[], is_diffusion=False
            ),
            compilation_config=compilation,
            scheduler_config=SimpleNamespace(max_num_seqs=num_seqs, max_num_batched_tokens=budget),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                distributed_executor_backend=None,
                use_ubatching=False,
                enable_elastic_ep=False,
                data_parallel_size=1,
            ),
            cache_config=SimpleNamespace(mamba_cache_mode="none", use_kda_recoverssm=False),
            attention_config=SimpleNamespace(hisparse_config=None),
            speculative_config=drafts,
            num_speculative_tokens=flags.num_speculative_tokens or 0,
            performance_mode=flags.performance_mode,
            lora_config=None,
        )

    def _modules(self, flags: GraphFlags) -> Mapping[str, ModuleType]:
        """What the functions import when they are called."""
        platform = SimpleNamespace(
            is_device_capability_family=lambda family: int(flags.capability) == family // 10, is_rocm=lambda: False
        )
        contents: dict[str, dict[str, Any]] = {
            "vllm": {},
            "vllm.platforms": {"current_platform": platform},
            "vllm.v1": {},
            "vllm.v1.attention": {},
            "vllm.v1.attention.backend": {"AttentionCGSupport": Support},
            "vllm.v1.spec_decode": {},
            "vllm.v1.spec_decode.dynamic": {},
            "vllm.v1.spec_decode.dynamic.utils": {
                "build_dynamic_sd_schedule_lookup": self.names["build_dynamic_sd_schedule_lookup"]
            },
            "vllm.compilation": {},
            "vllm.compilation.breakable_cudagraph": {"is_breakable_cudagraph_enabled": lambda: False},
        }
        made = {}
        for name, values in contents.items():
            made[name] = ModuleType(name)
            vars(made[name]).update(values)
        return made

    def _define(self, place: str, wanted: tuple[str, ...]) -> None:
        """Run the definitions of a module's functions and classes, in its order."""
        tree = self._tree(place)
        body = [node for node in tree.body if getattr(node, "name", "") in wanted]
        assert {getattr(node, "name", "") for node in body} == {*wanted}, f"{place}: {wanted}"
        self._run(body)

    def _methods(self, place: str, owner: str, *wanted: str) -> type:
        return cut_out(self._folder / "vllm" / f"{place}.py", owner, wanted, self.names)

    def _run(self, body: list[Any]) -> None:
        _run(body, self.names)

    def _tree(self, place: str) -> ast.Module:
        return ast.parse((self._folder / "vllm" / f"{place}.py").read_text(encoding="utf-8"))


def drawn_flags(release: str, seed: int) -> Iterator[GraphFlags]:
    """Flags without end: limits, drafts, given sizes, modes, tables, some that no server starts with."""
    draw = random.Random(f"{release} {seed}")
    while True:
        num_seqs = draw.choice((draw.randint(1, 24), draw.randint(1, 300)))
        drafts = draw.choice((0, draw.randint(1, 5), draw.randint(1, 16)))
        widest = num_seqs * (1 + drafts)
        flags: dict[str, Any] = {
            "release": release,
            "max_num_seqs": num_seqs,
            "capability": draw.choice((8.0, 9.0, 10.0)),
        }
        flags["max_num_batched_tokens"] = draw.choice((2048, 8192, max(num_seqs, draw.randint(1, 2 * widest))))
        if drafts:
            flags |= {"num_speculative_tokens": drafts, "method": draw.choice(METHODS)}
        if draw.random() < 0.5:
            flags["runner"] = draw.choice(("v1", "v2"))
        if draw.random() < 0.45:
            flags["cudagraph_capture_sizes"] = [
                draw.randint(1, draw.choice((9, widest, 600))) for _ in range(draw.randint(1, 12))
            ]
        if draw.random() < 0.25:
            sizes = flags.get("cudagraph_capture_sizes")
            flags["max_cudagraph_capture_size"] = max(sizes) if sizes and draw.random() < 0.8 else draw.randint(1, 700)
        if draw.random() < 0.4:
            flags["cudagraph_mode"] = draw.choice(MODES)
        if draw.random() < 0.4:
            flags["attention_support"] = draw.choice(SUPPORTS)
        if draw.random() < 0.15:
            flags["performance_mode"] = draw.choice(("interactivity", "throughput"))
        flags["enforce_eager"] = draw.random() < 0.04
        if drafts and draw.random() < 0.2:
            flags["num_speculative_tokens_per_batch_size"] = drawn_table(draw, num_seqs, drafts)
        yield GraphFlags(**flags)


def drawn_table(draw: random.Random, num_seqs: int, drafts: int) -> list[list[int]]:
    """Drafts by batch size: ranges with gaps, now and then one that is refused."""
    table, first = [], 1
    while len(table) < 4 and (not table or draw.random() < 0.6):
        last = first + draw.randint(0, num_seqs)
        table.append([first, last, draw.randint(0, drafts + 1)])
        first = last + draw.choice((1, 1, draw.randint(1, 5)))
    if draw.random() < 0.05:
        table[0][0] = 2
    return table
