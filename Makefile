# `make demo` and `make test` need only make and Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo figures test test-slow test-engines test-runtimes test-trackers test-versions test-gpu mutations models-table keras-tests notebooks docs lint format types clean

# One line a target: what stands behind its two hashes.
help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

# ENVIRONMENT/EXTRA.stamp, one stamp an extra: a second run finds it and starts at once.
%.stamp: setup.cfg pyproject.toml
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D) || \
	  { echo "Python's venv module is missing: on Debian, apt-get install python3-venv" >&2; rm -rf $(@D); exit 1; }
	@$(@D)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kbatch needs Python >= 3.11: run make PYTHON=/path/to/python3.11" >&2; rm -rf $(@D); exit 1; }
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable '.[$(*F)]'
	@touch $@

demo: .venv/demo.stamp ## a search on handwritten digits, its page and its figures, in kbatch-demo
	$(BIN)/kbatch demo

# The page and the picture of the README, on a quiet machine.
docs/images/trials.png: .venv/demo.stamp
	$(BIN)/python docs/demo.py

# The pictures of the guides and of the gallery, from the records in docs/data; the two scripts say
# how to make those again.
figures: .venv/demo.stamp ## draw the pictures of the guides and of the gallery again, from the recorded runs
	PYTHONPATH=benchmarks $(BIN)/python docs/figures.py
	$(BIN)/python docs/gallery.py

# Two processes: TensorFlow's graphs pile up in one, and most of a test runs on one core. The one
# that ends first takes over half of what the other has left.
test: .venv/test.stamp ## every dependency into .venv, and the fast tests; QUESTION=memory for those in tests/memory
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=10 \
	  -m "not slow and not gpu and not engine and not runtime and not tracker" $(QUESTION:%=tests/%)

test-slow: .venv/test.stamp ## the slow tests: many trials, killed processes, a browser, a fresh environment
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=10 \
	  -m "slow and not gpu and not engine and not runtime and not tracker" $(QUESTION:%=tests/%)

# Searches on SLURM (apt-get install slurm-wlm munge, as root), Ray and Dask, on this host alone.
test-engines: .venv/engines.stamp ## searches on SLURM, Ray and Dask, on this host
	$(BIN)/python -m pytest -m engine tests/engines

# Models of ONNX Runtime and LiteRT, and the example that serves one.
test-runtimes: .venv/runtimes.stamp ## predictions of ONNX Runtime and LiteRT themselves
	$(BIN)/python -m pytest -m runtime tests/inference tests/test_examples.py

# MLflow and Weights & Biases, which want other versions of what the rest uses.
test-trackers: .venv-trackers/trackers.stamp ## studies in MLflow and W&B themselves, in .venv-trackers
	.venv-trackers/bin/python -m pytest -m tracker tests/study

# The oldest versions that setup.cfg allows: training in parts, a search, the quickstart, the demo.
.venv-oldest/test.stamp: tests/oldest.txt
.venv-oldest/test.stamp: CONSTRAINTS = --constraint tests/oldest.txt
test-versions: .venv-oldest/test.stamp ## the oldest TensorFlow, Keras and others; the newest on Python 3.12 and 3.13 where these are
	@for python in python3.12 python3.13; do \
	  ! $$python -c 1 2>/dev/null || $(MAKE) PYTHON=$$python .venv-$$python/test.stamp || exit 1; done
	@for environment in .venv-oldest $$(ls -d .venv-python3.* 2>/dev/null); do \
	  $$environment/bin/python -m pytest -n 2 --dist worksteal tests/test_library_internals.py \
	    tests/training/test_accumulated_*.py tests/search/test_search.py \
	    tests/test_guides.py::test_the_python_of_the_readme_runs && \
	  $$environment/bin/kbatch demo --quick || exit 1; done

# Each in a process of its own; what they found is written into docs/gpu-checks, to be committed.
test-gpu: .venv/test.stamp $(if $(wildcard /dev/nvidia[0-9]* /dev/dxg),.venv/cuda.stamp) ## what needs an NVIDIA GPU; its findings are a page to commit
	$(BIN)/python -m pytest -m gpu tests/gpu

# Faults put into a copy of the core, one after the other, which its fast tests must find.
mutations: .venv/test.stamp ## put 60 faults into copies of the core, which the fast tests must find
	$(BIN)/python tests/mutations.py

models-table: .venv/test.stamp ## what kbatch does with each kind of model: the table of docs/models.md
	PYTHONPATH=.:tests $(BIN)/python -m models.verdicts

keras-tests: .venv/test.stamp ## Keras's own tests of training, in micro-batches
	$(BIN)/python tests/keras_trainer_tests.py

notebooks: .venv/notebook.stamp ## execute the notebooks and keep their outputs
	$(BIN)/python notebooks/execute.py

docs: .venv/docs.stamp ## the site, in build/docs; a warning or a number that was not measured is an error
	$(BIN)/python docs/check_numbers.py
	$(BIN)/python -m sphinx -W --keep-going -q -E docs build/docs

lint: .venv/dev.stamp ## ruff, as it must pass
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/dev.stamp ## ruff, with its fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/dev.stamp ## pyright
	$(BIN)/pyright

clean: ## remove the environments and what was built
	rm -rf .venv .venv-* build dist *.egg-info kbatch-demo
