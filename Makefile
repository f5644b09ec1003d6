# `make demo` and `make test` need only make and Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo figures test test-slow test-engines test-trackers test-versions test-gpu mutations models-table keras-tests notebooks docs lint format types clean

help:
	@echo "make demo | test | test-slow | test-engines | test-trackers | test-versions"
	@echo "     test-gpu | mutations | models-table | keras-tests | notebooks | docs | lint | format | types | clean"

# ENVIRONMENT/EXTRA.stamp, one stamp an extra: a second run finds it and starts at once.
%.stamp: setup.cfg pyproject.toml
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D) || \
	  { echo "Python's venv module is missing: on Debian, apt-get install python3-venv" >&2; rm -rf $(@D); exit 1; }
	@$(@D)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kbatch needs Python >= 3.11: run make PYTHON=/path/to/python3.11" >&2; rm -rf $(@D); exit 1; }
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable '.[$(*F)]'
	@touch $@

demo: .venv/demo.stamp
	$(BIN)/kbatch demo

# The picture of the README.
docs/images/trials.png: .venv/demo.stamp
	$(BIN)/kbatch demo && cp kbatch-demo/trials.png $@

# The pictures of the guides and of the gallery, from the records in docs/data; the two scripts say
# how to make those again.
figures: .venv/demo.stamp
	PYTHONPATH=benchmarks $(BIN)/python docs/figures.py
	$(BIN)/python docs/gallery.py

# Two processes: TensorFlow's graphs pile up in one, and most of a test runs on one core. The one
# that ends first takes over half of what the other has left.
test: .venv/test.stamp
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu and not engine and not tracker"

test-slow: .venv/test.stamp
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not gpu and not engine and not tracker"

# Searches on SLURM (apt-get install slurm-wlm munge, as root), Ray and Dask, on this host alone.
test-engines: .venv/engines.stamp
	$(BIN)/python -m pytest -m engine tests/engines

# MLflow and Weights & Biases, which want other versions of what the rest uses.
test-trackers: .venv-trackers/trackers.stamp
	.venv-trackers/bin/python -m pytest -m tracker tests/study

# The oldest versions that setup.cfg allows: training in parts, a search, the quickstart, the demo.
.venv-oldest/test.stamp: tests/oldest.txt
.venv-oldest/test.stamp: CONSTRAINTS = --constraint tests/oldest.txt
test-versions: .venv-oldest/test.stamp
	.venv-oldest/bin/python -m pytest -n 2 --dist worksteal tests/test_library_internals.py \
	  tests/training/test_accumulated_*.py tests/search/test_search.py \
	  tests/test_guides.py::test_the_python_of_the_readme_runs
	.venv-oldest/bin/kbatch demo --quick

# Each in a process of its own; what they found is written into docs/gpu-checks, to be committed.
test-gpu: .venv/test.stamp $(if $(wildcard /dev/nvidia[0-9]* /dev/dxg),.venv/cuda.stamp)
	$(BIN)/python -m pytest -m gpu tests/gpu

# Faults put into a copy of the core, one after the other, which its fast tests must find.
mutations: .venv/test.stamp
	$(BIN)/python tests/mutations.py

# The table of docs/models.md: what kbatch does with each kind of model.
models-table: .venv/test.stamp
	PYTHONPATH=.:tests $(BIN)/python -m models.verdicts

# Keras's own tests of training, with micro-batches underneath.
keras-tests: .venv/test.stamp
	$(BIN)/python tests/keras_trainer_tests.py

# Their outputs, made again.
notebooks: .venv/notebook.stamp
	$(BIN)/python notebooks/execute.py

# The site, in build/docs; a warning is an error.
docs: .venv/docs.stamp
	$(BIN)/python -m sphinx -W --keep-going -q -E docs build/docs

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/dev.stamp
	$(BIN)/pyright

clean:
	rm -rf .venv .venv-* build dist *.egg-info kbatch-demo
