# Two commands do everything on a fresh machine: make demo, make test. Set-up is a virtual environment and pip.
PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.installed

.PHONY: demo test lint bench docs clean

demo: $(SETUP)
	$(BIN)/segcal demo

test: $(SETUP)
	$(BIN)/pytest

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(SETUP)
	for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

docs: $(SETUP)
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis site segcal-demo

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@
