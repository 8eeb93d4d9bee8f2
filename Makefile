# `make demo` and `make test` need only Python >= 3.10 and make; each prepares what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint docs clean

# The demo screens checkpoints, which needs no torch: a light environment of its own, ready in seconds.
$(VENV)/.base: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

# The pinned CPU build comes first: an open range would pull gigabytes of CUDA libraries.
$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(VENV)/.base
	$(BIN)/screen-checkpoints --demo

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not network and not gpu"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

$(VENV)/.docs: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

# The reference pages come from the programs; `make docs` fails on a page that is not today's, and on a link that leads nowhere.
docs: $(VENV)/.docs
	$(BIN)/python -m cogapp --check -P docs/reference/*.md
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
