# `make demo` and `make test` need only Python >= 3.10 and make; each prepares what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all lint mass docs clean validity validity-hub

# The demo screens checkpoints, which needs no torch: a light environment of its own, ready in seconds.
$(VENV)/.base: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

# The CPU build comes first and alone: the public index's own brings gigabytes of CUDA libraries.
CPU_INDEX := https://download.pytorch.org/whl/cpu
$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --extra-index-url $(CPU_INDEX) torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(VENV)/.base
	$(BIN)/screen-checkpoints --demo

# Three workers on two cores: a sixth of the tests' time is waiting, for servers, disks and processes.
# Bytecode is kept, also where the environment says otherwise: every worker and every command that a test
# starts would compile all of it again.
test: $(VENV)/.dev lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder -m "not network and not gpu and not slow"

# With the long ones: clusters, kills, two processes, simulations at full count.
test-all: $(VENV)/.dev lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder -m "not network and not gpu"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/mass.py --circles

# Tokens, densities and reach, room by room.
mass: $(VENV)/.dev
	$(BIN)/python scripts/mass.py --reach

$(VENV)/.docs: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

# The reference pages come from the programs; `make docs` fails on a page that is not today's, and on a link that leads nowhere.
docs: $(VENV)/.docs
	$(BIN)/python -m cogapp --check docs/reference/*.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# How often is the order right? Trains the registered population where it was stopped, and writes its page.
validity: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.validity train --jobs 2
	$(BIN)/python -m benchmarks.validity page

# Released checkpoints and their published scores, on the real Hub: needs a network and HF_TOKEN. ARGS=--dry-run says what it costs.
validity-hub: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.validity.hub $(ARGS)

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
