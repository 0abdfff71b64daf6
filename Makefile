# `make demo` and `make test` set themselves up: Python 3.11 or newer is all they need. Runs with GNU make 3.81 (macOS).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check --no-input -c constraints.txt

# A Mac with Apple silicon needs no torch to draw, an NVIDIA machine no MLX; the tests compare both.
ifeq ($(shell uname -s)-$(shell uname -m),Darwin-arm64)
  DEMO_EXTRA := mlx
else
  DEMO_EXTRA := torch
endif

# Each test process computes on one core.
WORKERS ?= auto --maxprocesses=4
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --durations=15

export PYTHONUTF8 := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint bench clean

help:
	@echo "make demo       draw a picture with what this machine has (a model of random weights: noise)"
	@echo "make test       lint, types and all tests but the slow ones"
	@echo "make test-slow  the slow tests"
	@echo "make lint       lint and types alone"
	@echo "make bench      time one forward against diffusers (ARGS=\"--help\" for the options)"
	@echo "make clean      remove what was made, but for $(VENV)"
	@echo "Another Python: make PYTHON=python3.12 demo. Another folder for packages: make VENV=/path demo."

# What a person runs

demo: $(VENV)/.demo-ready demo/random-model/model_index.json
	@echo "The model demo/random-model has RANDOM weights, so the picture is noise: this shows that everything runs."
	$(BIN)/qwenimg -m demo/random-model "a red circle" --size 128x128 --steps 4 --seed 1 -o demo/random.png --overwrite

demo/random-model/model_index.json: tools/random_model.py tools/tiny_tokenizer.py | $(VENV)/.demo-ready
	$(BIN)/python tools/random_model.py demo/random-model

test: lint
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.test-ready
	$(PYTEST) -m slow

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test-ready
	$(BIN)/python tools/bench_step.py $(ARGS)

clean:
	rm -rf demo build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

# Set-up, once: a stamp is newer than what it was made from

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "qwenimg needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>/dev/null || echo not there`."; \
	  echo "Install one and name it: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.test-ready: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) -e ".[mlx,torch,dev]"
	@touch $@ $(VENV)/.demo-ready

$(VENV)/.demo-ready: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) -e ".[$(DEMO_EXTRA)]"
	@touch $@
