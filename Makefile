# Two commands do everything on a fresh machine: make demo, make test. Set-up is a virtual environment and pip.
PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.installed

.PHONY: demo test lint bench completions dist check-dist docs clean

demo: $(SETUP)
	$(BIN)/segcal demo

test: $(SETUP)
	$(BIN)/pytest

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typing

bench: $(SETUP)
	for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# What a shell completes, from the options of all commands.
completions: $(SETUP)
	$(BIN)/python -c "from segcal.cli import commands, completion; completion.write(commands.app)"

# A wheel and a source archive.
dist: $(SETUP)
	rm -rf dist
	$(BIN)/pip install -q -c constraints.txt build
	$(BIN)/python -m build --outdir dist

# The wheel alone, in an environment of its own and outside this folder, runs the demo.
check-dist: dist
	rm -rf dist/check
	$(PYTHON) -m venv dist/check/venv
	dist/check/venv/bin/pip install -q -c constraints.txt dist/*.whl
	cd dist/check && venv/bin/segcal --version && venv/bin/segcal doctor && venv/bin/segcal demo
	test -s dist/check/segcal-demo/report/index.html

docs: $(SETUP)
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache .hypothesis site segcal-demo

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@
