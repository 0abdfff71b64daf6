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

# Each test process computes on one core. It begins with neighbours, which share what they have made.
WORKERS ?= auto --maxprocesses=4
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=15

export PYTHONUTF8 := 1
# Where it is set, each of some hundred processes of the tests would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo picture test suite test-fast test-all test-rest test-slow test-newest lint twins bench parity mutations gate clean

help:
	@echo "make demo       draw a grid of pictures with the built-in model, on what this machine has"
	@echo "make test       lint, types and the tests, of what takes long a sample"
	@echo "make test-fast  the tests without reference libraries or pictures: for the loop of who changes something"
	@echo "make test-all   all tests but the slow ones: before a release, and after a change of what families share"
	@echo "make test-rest  what test-all has and test has not"
	@echo "make test-slow  the slow tests"
	@echo "make test-newest  the tests with the newest torch, MLX and all others, in an environment of its own"
	@echo "make lint       lint and types alone"
	@echo "make twins      translate the networks on torch to MLX, after a change of one"
	@echo "make bench      time one forward against diffusers (ARGS=\"--help\" for the options)"
	@echo "make parity     compare every model, policy and sampler on the backends of this machine (BACKENDS=mlx,cuda)"
	@echo "make mutations  plant faults on both backends: each must be caught (ARGS=qwen for one family)"
	@echo "make gate       draw and judge all prompts of the built-in model's quality gate (ARGS=\"--help\")"
	@echo "make picture    draw the README's first picture again"
	@echo "make clean      remove what was made, but for $(VENV)"
	@echo "Another Python: make PYTHON=python3.12 demo. Another folder for packages: make VENV=/path demo."

# What a person runs

GRID := "a red circle" "a large blue star" "two yellow hearts" "a small green cross on a black background" \
  "a brown diamond at the bottom" "a pink ring to the left of a black cross" "一个红色的圆在左边" "一个大的黄色的方块，黑色背景"

demo: $(VENV)/.demo-ready
	$(BIN)/python tools/grid.py demo/shapes.png $(GRID)
	@echo
	@echo 'The command is $(BIN)/qwenimg. What to run next:'
	@echo '  $(BIN)/qwenimg "a large blue star"       # draws it into this folder and prints its name'
	@echo '  $(BIN)/qwenimg selftest                  # draws 40 prompts and checks every picture'
	@echo '  $(BIN)/qwenimg --help                    # all options; README.md has the models for real pictures'
	@echo 'To call it qwenimg: source $(BIN)/activate'

picture: $(VENV)/.demo-ready
	$(BIN)/python tools/grid.py docs/pictures/first.png $(GRID)

test: $(VENV)/.test-ready
	@echo 'Lint, types and the tests, side by side: some ten minutes on two cores.'
	@$(MAKE) -j 2 lint suite

suite: $(VENV)/.test-ready
	$(PYTEST) -m "not slow and not rest"

# No reference library, no framework but one, no picture: rooms that compute are left to `make test`.
FAST := architecture base cli hub jobs numbers pictures

test-fast: $(VENV)/.test-ready
	$(PYTEST) -m "not slow and not rest" $(addprefix tests/,$(FAST))

test-all: $(VENV)/.test-ready
	$(PYTEST) -m "not slow"

test-rest: $(VENV)/.test-ready
	$(PYTEST) -m "rest and not slow" $(ARGS)

test-slow: $(VENV)/.test-ready
	$(PYTEST) -m slow

# What a person gets who installs by the README today. The reference libraries keep their versions.
NEWEST := .venv-newest

test-newest:
	@$(PYTHON) -m venv $(NEWEST)
	@echo 'Installing the newest of everything into $(NEWEST): on Linux 6 GB, with the CUDA build of torch.'
	PIP_CONSTRAINT= PIP_CONFIG_FILE=/dev/null $(NEWEST)/bin/python -m pip install -q --disable-pip-version-check --no-input --upgrade --upgrade-strategy eager -e ".[mlx,torch,serve,dev]"
	$(NEWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not rest"

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

twins: $(VENV)/.test-ready
	$(BIN)/python tools/twin.py

bench: $(VENV)/.test-ready
	$(BIN)/python tools/bench_step.py $(ARGS)

# The backends to compare: what is not on this machine is skipped by name.
BACKENDS ?= mlx,cuda

parity: $(VENV)/.test-ready
	$(PYTEST) -m parity --backends $(BACKENDS)

mutations: $(VENV)/.test-ready
	$(BIN)/python tools/mutations.py $(ARGS)

gate: $(VENV)/.test-ready
	@mkdir -p demo
	$(BIN)/python tools/gate.py run --workers 2 --out demo/gate.json $(ARGS)

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
	@echo 'Installing torch, MLX and the tools of the tests into $(VENV), once: 2.5 GB with the CPU build of torch and several'
	@echo 'with that for CUDA, so a few minutes, or more on a slow line. pip prints nothing until it is done.'
	$(PIP) -e ".[mlx,torch,serve,dev]"
	@touch $@ $(VENV)/.demo-ready

$(VENV)/.demo-ready: $(VENV)/.made pyproject.toml constraints.txt
	@echo 'Installing qwenimg and $(DEMO_EXTRA) into $(VENV), once: a minute or more. pip prints nothing until it is done.'
	$(PIP) -e ".[$(DEMO_EXTRA)]"
	@touch $@
