# Everything a newcomer needs, and nothing installed outside .venv.
#   make demo    the main job on MovieLens-100k, end to end
#   make test    lint, types and tests (integration tests against real servers included)
#   make faults  every fault, the slow ones too: servers and workers killed, frozen, cut off, filled up; then
#                records are fuzzed for FUZZ_SECONDS=120
#   make crash-matrix  KILLS=100 SEED=0: SIGKILL at random moments, and proof that nothing is lost or doubled
#   make sizing  what a million users and items take in Redis, in memory and on disk
#   make audit   known vulnerabilities of what constraints.txt pins; needs PyPI itself
#
# TORCH_INDEX=<url>   take torch from this package index (for example PyTorch's CPU index); default: plain pip
# KAFKA_HOME=<dir>    use this unpacked Apache Kafka 4.x as the broker
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
AUDIT := .venv-audit

KILLS ?= 100
SEED ?= 0
FUZZ_SECONDS ?= 120

.PHONY: help setup demo test lint format unit faults crash-matrix sizing audit readme clean

help:
	@sed -n '2,13s/^# \{0,1\}//p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed (PYTHON=... chooses one)"; exit 1; }
	@echo "Installing into $(VENV): some minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# its dependencies come with the next line: an index of torch builds need not have the versions we pin
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --no-deps -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m replay demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest -q -m "not slow and (quick or not faults)"

faults: setup
	$(BIN)/python -m pytest -q -m faults
	$(BIN)/python -m tests.fuzz_decode --seconds $(FUZZ_SECONDS)

crash-matrix: setup
	$(BIN)/python -m tests.faults.crash_matrix --kills $(KILLS) --seed $(SEED)

sizing: setup
	$(BIN)/python -m benchmarks.sizing

# --strict: what the index does not know is not as good as what has no vulnerability
audit:
	test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip install --quiet pip-audit; }
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

test: lint unit

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: setup
	$(BIN)/python docs/update_readme.py

clean:
	rm -rf $(VENV) $(AUDIT) .freshet reports build dist *.egg-info
