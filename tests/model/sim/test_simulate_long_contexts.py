"""Prompts of 150,000 tokens: both texts of the simulator decide alike, and a return finds its blocks."""

from __future__ import annotations

from harness.model.engine import load_cost_model
from harness.model.engine.config import EngineConfig
from harness.model.experiment import build_plan
from harness.model.sim import simulate
from harness.model.sim.plans import plan_arrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerSpec, WorkloadSpec


def test_long_prompts_are_simulated_alike_by_steps_and_compiled() -> None:
    lengths = {"distribution": "uniform", "low": 140_000, "high": 150_000}
    workload = WorkloadSpec.model_validate(
        {
            "num_sessions": 3,
            "prompt_tokens": lengths,
            "generate_tokens": {"distribution": "fixed", "value": 20},
            "wait_cap_s": 2.0,
        }
    )
    server = ServerSpec(rules="vllm-paged", cost_model="emulated-gpu", slot_tokens=262_144, num_gpu_blocks=40_000)
    plan, config, model = build_plan(workload, 5, 0), EngineConfig.from_server(server), load_cost_model("emulated-gpu")
    stepped, compiled = simulate(plan, config, model), run_batch(plan_arrays([plan]), config, model)
    totals = compiled.totals
    assert stepped.device_ns == int(totals["decode_ns"][0] + totals["prefill_ns"][0])
    cached = stepped.requests["cached_tokens"].to_pylist()
    assert sum(cached) == int(totals["cached_tokens"][0])
    assert sum(tokens > 139_000 for tokens in cached) == 3
