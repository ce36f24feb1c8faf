# Everything a newcomer needs, and nothing installed outside .venv.
#   make demo    the main job on MovieLens-100k, end to end
#   make test    lint, types and tests (integration tests against real servers included)
#   make faults  every fault, the slow ones too: servers and workers killed, frozen, cut off, filled up; records fuzzed
#   make crash-matrix  KILLS=100 SEED=0: SIGKILL at random moments, and proof that nothing is lost or doubled
#
# TORCH_INDEX=<url>   take torch from this package index (for example PyTorch's CPU index); default: plain pip
# KAFKA_HOME=<dir>    use this unpacked Apache Kafka 4.x as the broker
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed

KILLS ?= 100
SEED ?= 0
FUZZ_SECONDS ?= 120

.PHONY: help setup demo test lint format unit faults crash-matrix readme clean

help:
	@sed -n '2,10s/^# \{0,1\}//p' Makefile

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

test: lint unit

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: setup
	$(BIN)/python docs/update_readme.py

clean:
	rm -rf $(VENV) .freshet reports build dist *.egg-info
