# Targets explain themselves: `make help` prints the comments behind `##`.
.PHONY: help setup demo test test-rest test-all unit coverage lint trackers pythons tiny-model clean-runs
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON_BIN := .venv/bin/python
# Tests start many processes, each of which would compile our code where no bytecode may be written.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PYTHON_BIN) -m pytest -n 2 --dist loadfile
DEMO := runs/demo
INSTALLS := setup/install.sh setup/build-tools.txt setup/constraints-cpu.txt setup/constraints-gpu.txt setup/torchvision_cpu_ops.py pyproject.toml

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.installed ## install everything into .venv (about 3 minutes)

.venv/.installed: $(INSTALLS)
	@bash setup/install.sh

demo: .venv/.installed ## the main job at a small size: draw problems, train GRPO and ADORA, evaluate before and after (2 to 10 minutes)
	@bash setup/demo.sh $(DEMO)

test: lint ## what to run before a commit: lint, types, the quick tests, and those slow ones that prove most (about 10 minutes)
	@# Two files at a time with one thread each: the tiny model gains nothing from a second thread, and engines take long
	@# to start. In the order of the folders: the files with engines come first, and quick ones fill the gaps at the end.
	@# Coverage is not measured here: it takes up to half as long again.
	$(PYTEST) --no-loadscope-reorder -m "not slow or core"

test-rest: .venv/.installed ## every other test: all engines, families, faults, stops, fuzz (about 55 minutes)
	$(PYTEST) --no-loadscope-reorder -m "slow and not core"

test-all: test test-rest ## every test

unit: .venv/.installed ## the unit tests that are quick: no engine, no training (under 3 minutes)
	$(PYTEST) -q -m "not slow" tests/unit

coverage: .venv/.installed ## the quick unit tests, and which share of each file they run (at least 90 % in all): the 20 files with the least, and all
	$(PYTEST) -q -m "not slow" tests/unit --cov --cov-report= --cov-fail-under=90
	@$(PYTHON_BIN) -m coverage report | awk 'NR <= 22 || /^TOTAL/'

lint: .venv/.installed ## ruff, mypy, the Dockerfile, the floors (every import runs downwards), and how hard it is to read
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo --no-cache
	@# Counts by room that only go down: `python setup/readable.py --update` writes down what has become less.
	$(PYTHON_BIN) setup/readable.py
	.venv/bin/hadolint setup/Dockerfile

trackers: .venv/.installed ## run the tests of tensorboard, wandb and trackio, installed by their extra (about 2 minutes)
	@bash setup/check_trackers.sh

pythons: .venv/.installed ## check every supported Python: wheels of all pins, and two training steps where it is installed
	@bash setup/check_pythons.sh

tiny-model: .venv/.installed ## rebuild the tiny models that stand in adora_vl/builtin (about 15 minutes)
	$(PYTHON_BIN) -m adora_vl.builtin --output adora_vl/builtin/pretrained
	$(PYTHON_BIN) -m adora_vl.builtin --output adora_vl/builtin/pretrained_perimeter --start tiny_perimeter
	$(PYTHON_BIN) -m adora_vl.builtin --output adora_vl/builtin/pretrained_zoom --start tiny_zoom

clean-runs: ## delete runs/
	rm -rf runs
