# Two commands do everything on a fresh machine: make demo, make test. Set-up is a virtual environment and pip.
PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.installed
INTEGRATIONS := .venv/.integrations
TORTURE := tests/torture tests/properties tests/test_determinism.py
SEGCAL_SEED ?= $(shell date +%-j)

# Bytecode is kept, whatever the shell says: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test torture faults mutation test-integrations test-lowest test-newest lint audit bench reproduce-smoke completions dist check-dist docs clean

demo: $(SETUP)
	$(BIN)/segcal demo

# All but what the next two targets run.
test: $(SETUP)
	$(BIN)/pytest --ignore tests/integrations $(addprefix --ignore ,$(TORTURE))

# Hard numbers and laws in more rounds, with a seed of its own every day of the year: about two minutes on one core.
# SEGCAL_SEED=17 make torture repeats that of day 17.
torture: $(SETUP)
	SEGCAL_SEED=$(SEGCAL_SEED) SEGCAL_ROUNDS=2 $(BIN)/pytest -v $(TORTURE)

# What works with other libraries and with torch's compilers, with the real ones: these tests must run, not skip.
test-integrations: $(INTEGRATIONS)
	SEGCAL_REQUIRE_INTEGRATIONS=1 $(BIN)/pytest tests/integrations tests/cases/test_nnunet.py tests/cli/test_nnunet.py

# Two CPU minutes of damaged input, then of killed commands, with the same seed.
faults: $(SETUP)
	@echo "seed $(SEGCAL_SEED)"
	$(BIN)/python benchmarks/fuzz.py --minutes 1 --seed $(SEGCAL_SEED)
	$(BIN)/python benchmarks/faults.py --points 1 --seed $(SEGCAL_SEED)

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typing

# With the oldest versions that pyproject.toml allows, and with the newest there are, for one or another PYTHON: gigabytes,
# as only the set-up's torch has a small CPU build. Old versions warn of what was new since. Not in CI.
test-lowest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-lowest test-newest:
	$(PYTHON) -m venv .venv/$@
	.venv/$@/bin/pip install -q uv
	.venv/$@/bin/uv pip install -q --python .venv/$@/bin/python --resolution $(RESOLUTION) -e '.[all,monai]'
	.venv/$@/bin/pip install -q pytest pytest-xdist hypothesis
	.venv/$@/bin/pytest -o filterwarnings=default --ignore tests/integrations $(addprefix --ignore ,$(TORTURE))

# Known vulnerabilities of the pinned set-up, in an environment of its own. Asks the index of packages.
audit:
	$(PYTHON) -m venv .venv/audit
	.venv/audit/bin/pip install -q pip-audit
	.venv/audit/bin/pip-audit --no-deps --disable-pip -r constraints.txt

# Small changes of the source, which tests should notice: an hour or two on one core. It goes on where it was stopped.
mutation: $(SETUP)
	$(BIN)/pip install -q cosmic-ray coverage
	$(BIN)/python benchmarks/mutation.py
	$(BIN)/python benchmarks/mutation.py --again --seconds 20

bench: $(SETUP)
	for file in $(filter-out benchmarks/mutation.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# The recipes of reproduce/ in miniature, on a CPU and without data; and the claims, from the numbers that are committed.
reproduce-smoke: $(SETUP)
	$(BIN)/python reproduce/acdc/run.py --smoke
	$(BIN)/python reproduce/hippocampus/run.py --smoke
	$(BIN)/python reproduce/camvid/run.py --smoke
	$(BIN)/python reproduce/claims.py >/dev/null

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
	rm -rf .venv .vision dist .mypy_cache .ruff_cache .pytest_cache .hypothesis site segcal-demo

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

# torchvision has no CPU build on PyPI. Beside a CPU build of torch it cannot be imported, and libraries that find it fail:
# it is taken out of the environment, and recipes that need its networks look for it in .vision.
$(INTEGRATIONS): $(SETUP)
	$(BIN)/pip install -q -c constraints.txt -e '.[test-integrations]'
	$(BIN)/pip uninstall -qy torchvision
	$(BIN)/pip install -q --no-deps --target .vision --upgrade torchvision==0.28.0 timm==1.0.31 segmentation-models-pytorch==0.6.0
	touch $@
