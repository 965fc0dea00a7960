# make install | quickstart | quickstart-grpo | test | lint | bench | bench-gpu | reliability
# Each creates .venv on its first use; a second call starts at once. bench, bench-gpu and reliability write reports/.
PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2
PIP_FLAGS ?=
PYTEST_FLAGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REWARDS := $(VENV)/.installed-rewards

.PHONY: install quickstart quickstart-grpo test lint bench bench-gpu reliability clean

# Two cores are the reference machine. A fixed number of threads, here as many, keeps results the same from run to run;
# tests and the reliability benchmark start several processes, and take one thread each.
export OMP_NUM_THREADS ?= 2

install: $(STAMP)

quickstart: $(STAMP)
	$(BIN)/python -m alignment.quickstart --model $(MODEL)

quickstart-grpo: $(REWARDS)
	$(BIN)/python -m alignment.quickstart_grpo --model $(MODEL)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.halves $(PYTEST_FLAGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.logprobs
	$(BIN)/python -m benchmarks.performance

bench-gpu: $(STAMP)
	$(BIN)/python -m benchmarks.performance H1 H2
	$(BIN)/python -m pytest -m gpu

reliability: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.reliability
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.doctor

# torch goes first: alone and pinned, pip takes the build the index offers instead of resolving around it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt torch
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[test]'
	touch $(STAMP)

$(REWARDS): $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[rewards]'
	touch $(REWARDS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
