# Every target creates a local virtual environment, and needs only Python >= 3.11.
#   make test PYTHON=python3.12             another interpreter
#   make test TORCH=torch==2.13.0           another build of torch, installed first
PYTHON ?= python3
TORCH ?= torch>=2.11,<2.14
VENV ?= .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed

WORKERS ?= 2
XDIST = $(BIN)/python -m pytest -q -n $(WORKERS)
FAMILIES := tests/runtime/test_every_family.py::test_logits_are_those_of_transformers
INTERPRETED := tests/triton_kernels/interpreter tests/gpu_proofs/interpreted tests/bench/interpreted $(FAMILIES)

.PHONY: demo test test-statistics test-fuzz test-hostile test-models test-ray test-sdks prove-gpu bench \
	pictures lint clean

# Without smollm2 the demo leaves its chat out, and says so.
demo: $(RUNTIME)
	@$(BIN)/cbatch get smollm2 >/dev/null || true
	@$(BIN)/cbatch demo

# On $(WORKERS) CPUs. Interpreted kernels need processes of their own.
test: lint
	TRITON_INTERPRET=1 $(XDIST) $(INTERPRETED)
	$(XDIST) --dist loadfile --no-loadscope-reorder

# Distributions over large samples, whole engines among them: minutes.
test-statistics: $(DEV)
	$(BIN)/python -m pytest -q -m statistics

# Ten thousand mutated model files, by CBATCH_FUZZ_SEED (0), in a few minutes.
test-fuzz: $(DEV)
	$(BIN)/python -m pytest -s -m fuzz tests/runtime

# A server with honest and hostile clients, for CBATCH_HOSTILE_S seconds (600), by
# CBATCH_HOSTILE_SEED (0). It prints its progress, and at its end the result of each attack.
test-hostile: $(DEV)
	$(BIN)/python -m pytest -s -m hostile tests/hostile

# Every supported architecture of transformers, tiny, compared with its own eager pass, and every
# build of our C: minutes.
test-models: $(DEV)
	$(BIN)/python -m pytest -q -m "models or builds" tests/runtime

# Two replicas on Ray Serve under load, one killed and one scaled away: minutes.
test-ray: $(VENV)/.ray-installed
	$(BIN)/python -m pytest -s -m ray tests/server tests/cli

# Agent frameworks as clients of a real model: a minute, after minutes of installs.
test-sdks: $(VENV)/.sdks-installed
	$(BIN)/python -m pytest -q -m sdks tests/server

# Proofs about the code for GPUs without a GPU: see docs/gpu.md. All sizes of executors, then an audit
# of every launch of the interpreter's tests.
prove-gpu: $(DEV)
	$(BIN)/python -m pytest -q -m "gpu_proofs or not gpu_proofs" tests/gpu_proofs
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -m gpu_proofs $(FAMILIES)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -p tests.gpu_proofs.audit \
		tests/triton_kernels/interpreter

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Single functions are compared with the run before, in .benchmarks. Several threads would wait for each
# other on a busy machine.
bench: $(DEV)
	$(BIN)/python -m bench.scheduler
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/bench/test_micro.py --benchmark-enable --benchmark-only \
		--benchmark-autosave --benchmark-compare --benchmark-max-time=0.5 -W default

# Draw the pictures of README and docs again, but for screenshots and those of other commands.
pictures: $(DEV)
	$(BIN)/python -m bench.pictures

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Python compiles what it imports at its first use: pip would take twice as long for all files.
$(RUNTIME): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
		f"cbatch needs Python 3.11 or newer, this is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-compile --editable .
	@touch $@

$(VENV)/.ray-installed: $(DEV)
	$(BIN)/python -m pip install --quiet --editable ".[ray]"
	@touch $@

$(VENV)/.sdks-installed: $(DEV)
	@$(BIN)/python -m pip install --quiet --editable ".[sdks]"
	@touch $@

$(DEV): $(RUNTIME)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@$(BIN)/cbatch get smollm2 >/dev/null || echo "tests that need smollm2 will be skipped"
	@touch $@
