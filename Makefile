# One word per task; `make check` is what CI runs.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
TORCH  ?= torch==2.13.0

.PHONY: setup lint types house check slow test docs bench clean

setup: $(BIN)/drivetrain          ## make the environment: torch first, so that nothing else picks its build

$(BIN)/drivetrain: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

house:
	$(BIN)/lint-imports

check: lint types house           ## everything that can be said without running a rank
	$(BIN)/pytest -m "not slow"

slow:                             ## the tests that check leaves out: longer trainings on real ranks
	$(BIN)/pytest -m slow

test:                             ## all tests
	$(BIN)/pytest

docs:
	$(BIN)/mkdocs build --strict

bench:                            ## the campaigns; results land in benchmarks/results/
	$(BIN)/drivetrain bench overhead --output benchmarks/results/overhead
	$(BIN)/drivetrain bench bitwise --output benchmarks/results/bitwise

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache
