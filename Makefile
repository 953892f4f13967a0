# All targets use .venv, which the first one creates. To install from another index (for example torch without CUDA), set
# pip's variables: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS.
PYTHON ?= python3
# RAY=2.61.0 tests another version of Ray, in an environment of its own.
RAY ?=
VENV := .venv$(RAY:%=-ray-%)
BIN := $(VENV)/bin
DATA := data/stdlib
RUN ?= gpt
SCHEDULES ?= 200

# More workers than two cores, because tests mostly wait. After ten failures, of which each may have waited ten minutes, they
# are printed and the others left out.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder --durations=20 --maxfail=10

# Otherwise each of a thousand processes would compile what it imports of this repository, and pytest rewrite its assertions.
export PYTHONDONTWRITEBYTECODE :=

# Tests of trainer/ that need a GPU, apart from those that import Ray.
GPU_TESTS := tests/gpu $(addprefix tests/trainer/,callbacks/test_throughput.py metrics/test_means.py \
	metrics/test_reductions.py setup/test_float8.py step/test_optimizer_step.py)

.PHONY: help train test test-all test-gpu chaos check format types docs bench bench-gpu clean

help:
	@echo "make train    train a GPT on Python's standard library, with two Ray workers on this machine"
	@echo "make test     run the tests that guard the promises"
	@echo "make test-all run the rest: autoscaling, jobs, more chaos, examples, documentation snippets, browser, the wheel"
	@echo "make test-gpu run the tests that need a GPU, with the torch and pytest of PYTHON"
	@echo "make chaos    run two hundred schedules of kills, full disks and damaged files"
	@echo "make check    check format, lint, types and documentation"
	@echo "make docs     build the documentation in build/site"
	@echo "make bench    compare speed and memory with alternatives"
	@echo "make bench-gpu compare a GPT of 124M parameters with a bare loop, on a GPU, with the torch of PYTHON"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade --constraint constraints.txt setuptools
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@if [ -n "$(RAY)" ]; then $(BIN)/pip install --quiet --no-deps ray==$(RAY); fi
	@touch $@

$(DATA)/vocabulary.json: | $(VENV)/installed
	$(BIN)/python examples/prepare_stdlib.py $(DATA)

train: $(VENV)/installed $(DATA)/vocabulary.json
	$(BIN)/headway fit examples/gpt.py name=$(RUN)

test: $(VENV)/installed types
	$(PYTEST) -m "not extended"

# The tests that `make test` excludes; `.venv/bin/python -m pytest` runs both, in one process. One worker more, because half
# of them wait for machines.
test-all: WORKERS = 4
test-all: $(VENV)/installed types
	$(PYTEST) -m extended

# In place, because a machine with GPUs usually has its own torch; pytest is enough, without its plugins. Without a GPU all
# of them are skipped.
test-gpu: types
	PYTHONPATH=build/types $(PYTHON) -m pytest -o addopts=-ra -W default::pytest.PytestConfigWarning -m gpu $(GPU_TESTS)

# SCHEDULES=50 runs fewer; `python -m tests.chaos --seed 17` repeats one.
chaos: $(VENV)/installed types
	$(BIN)/python -m tests.chaos --schedules $(SCHEDULES)

check: $(VENV)/installed types docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p headway.trainer -p headway.orchestrator
	$(BIN)/mypy build/types/headway/datasets/*.py build/types/headway/datasets/*/*.py

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Links to the three folders under their installed names, for mypy, editors and Ray's py_modules.
types:
	@mkdir -p build/types/headway
	@for part in trainer datasets orchestrator; do ln -sfn ../../../$$part build/types/headway/$$part; done

# Strict, without network: a broken link, a missing name and a page outside the navigation are errors.
docs: $(VENV)/installed types
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks

# SMOKE=--smoke tries it on a CPU, with a tiny model.
bench-gpu: types
	PYTHONPATH=build/types $(PYTHON) -m benchmarks.gpu $(SMOKE)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
