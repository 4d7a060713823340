# Each target installs what it needs into .venv; only Python 3.11 to 3.13, make and git are required.
PYTHON ?= python3
EXTRAS ?= simulation,report,parquet
BIN := .venv/bin
TESTS := -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile
PYTEST := $(BIN)/python $(TESTS)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: run reproduce test test-full test-all coverage check docs docs-serve bench fuzz studies lowest newest locked clean wheel dist
.DELETE_ON_ERROR:

# An honest training run, which keeps its claim, and the same with half the noise, which breaks it; 0 if both are found.
run: .venv/core.done
	$(BIN)/coalmine run --out runs/honest
	$(BIN)/coalmine run --fault halved-noise --out runs/halved-noise; test $$? -eq 1

# The paper's experiments at scale small, each checked for its claims and trends; see docs/evidence/reproduction.md.
reproduce: .venv/dev.done
	$(BIN)/python -m studies.reproduction

# Something of every package and integration, in some five minutes on two cores.
test: .venv/dev.done
	$(PYTEST) -m "not full and not slow"

# The rest: real processes, browsers, long simulations, and the wheel.
test-full: .venv/dev.done wheel
	$(PYTEST) -m "full and not slow"

test-all: .venv/dev.done wheel
	$(PYTEST) -m "not slow"

# The lines and branches of the package that `test` and `test-full` cover together.
coverage: .venv/dev.done wheel
	rm -rf build/coverage && mkdir -p build/coverage
	-$(BIN)/python -m coverage run $(TESTS) -m "not slow"
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

check: .venv/dev.done docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documentation as a site; a broken link, a page that no list names, or a docstring that cannot be read is an error.
docs: .venv/dev.done
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html docs build/docs

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs 8000

bench: .venv/dev.done
	$(BIN)/python -m benchmarks

# Random bad input for every entry point of the package: no traceback, no exit code 70, no hang.
fuzz: .venv/dev.done
	$(BIN)/python -m fuzz

studies: .venv/dev.done
	$(BIN)/python -m studies

# Build the wheel, install it into a separate environment, and try it there: without extras, then with the commands.
wheel: .venv/wheel.done

.venv/wheel.done: .venv/dev.done $(shell find src -name '*.py') README.md
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel . > build/wheel/log
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt build/wheel/*.whl
	cd build/wheel && venv/bin/python ../../tests/try_wheel.py
	build/wheel/venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt "$$(echo build/wheel/*.whl)[cli]"
	cd build/wheel && venv/bin/python ../../tests/try_wheel.py cli
	touch $@

# Exactly the versions and files of requirements.lock, and nothing that an index may have changed; torch, whose CPU wheels are
# apart, by its version. `python .ci/lock.py` writes the lock again after a change of constraints.txt.
locked: .venv/bin/python
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes --requirement requirements.lock
	$(PIP) --no-deps torch
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .

# The release: an sdist, the wheel that it makes, a check that PyPI can show their description, and a bill of materials.
dist: .venv/dev.done
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/sbom.py > dist/coalmine-$$($(BIN)/python -c 'import coalmine; print(coalmine.__version__)').cdx.json

# The tests with the lowest versions that pyproject.toml allows, and with the newest available, each in its own environment.
lowest newest: .venv/dev.done
	$(BIN)/python .ci/versions.py $@ --python $(PYTHON)

.venv/bin/python:
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14), f"coalmine needs Python 3.11 to 3.13, this is {sys.version.split()[0]}: make PYTHON=..."'
	$(PYTHON) -m venv .venv

.venv/core.done: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable '.[cli,simulation,report]'
	touch $@

.venv/dev.done: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable '.[dev,$(EXTRAS)]'
	touch $@ .venv/core.done

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
