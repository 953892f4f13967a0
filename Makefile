# Everything happens in .venv, which the first target that needs it makes. On a machine without a GPU, or where other
# packages are to be taken, say so to pip as usual: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA := data/stdlib
RUN ?= gpt
SCHEDULES ?= 200

# On two cores, since much of what the tests do is to wait.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder --durations=20

.PHONY: help train test test-all chaos check format types docs bench clean

help:
	@echo "make train    learn a GPT from Python's standard library, on two Ray workers of this machine"
	@echo "make test     the tests that guard the promises, in less than ten minutes"
	@echo "make test-all the rest: more chaos, examples, every snippet of the documentation, reports in a browser, the wheel"
	@echo "make chaos    two hundred schedules of kills, full disks and damaged files; a dozen are in the tests"
	@echo "make check    format, lint, types, documentation"
	@echo "make docs     the documentation, in build/site"
	@echo "make bench    speed and memory, side by side with the alternatives"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade --constraint constraints.txt setuptools
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

$(DATA)/vocabulary.json: | $(VENV)/installed
	$(BIN)/python examples/prepare_stdlib.py $(DATA)

train: $(VENV)/installed $(DATA)/vocabulary.json
	$(BIN)/headway fit examples/gpt.py name=$(RUN)

test: $(VENV)/installed types
	$(PYTEST) -m "not extended"

# What make test leaves out; `.venv/bin/python -m pytest` runs both, one after the other.
test-all: $(VENV)/installed types
	$(PYTEST) -m extended

# SCHEDULES=50 runs fewer; `python -m tests.chaos --seed 17` repeats one.
chaos: $(VENV)/installed types
	$(BIN)/python -m tests.chaos --schedules $(SCHEDULES)

check: $(VENV)/installed types docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p headway.trainer -p headway.orchestrator
	$(BIN)/mypy build/types/headway/datasets/*.py

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Links that show the three folders under the name they are installed by, for mypy, editors and Ray's py_modules.
types:
	@mkdir -p build/types/headway
	@for part in trainer datasets orchestrator; do ln -sfn ../../../$$part build/types/headway/$$part; done

# Without network, and strict: a link to nowhere, a name that is gone and a page outside the navigation are errors.
docs: $(VENV)/installed types
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
