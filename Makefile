# Targets explain themselves: `make help` prints the comments behind `##`.
.PHONY: help setup demo test unit coverage lint trackers pythons tiny-model clean-runs
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON_BIN := .venv/bin/python
DEMO := runs/demo
INSTALLS := setup/install.sh setup/build-tools.txt setup/constraints-cpu.txt setup/constraints-gpu.txt setup/torchvision_cpu_ops.py pyproject.toml

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.installed ## install everything into .venv (about 3 minutes)

.venv/.installed: $(INSTALLS)
	@bash setup/install.sh

demo: .venv/.installed ## the main job at a small size: draw problems, train, evaluate before and after (5 to 10 minutes); GRPO=1 trains plain GRPO too
	@GRPO=$(GRPO) bash setup/demo.sh $(DEMO)

test: lint ## what CI runs: lint, types and every test, with real TRL, vLLM and DeepSpeed (30 to 45 minutes)
	@# Two files at a time with one thread each: the tiny model gains nothing from a second thread, and engines take long
	@# to start. In the order of the folders: the files with engines come first, and quick ones fill the gaps at the end.
	@# The line of the coverage stands above the closing line; `make coverage` shows where the gaps are.
	OMP_NUM_THREADS=1 $(PYTHON_BIN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		--cov --cov-report= --cov-fail-under=90

unit: .venv/.installed ## the unit tests that are quick: no engine, no training (under 3 minutes)
	OMP_NUM_THREADS=1 $(PYTHON_BIN) -m pytest -n 2 --dist loadfile -q -m "not slow" tests/unit

coverage: .venv/.installed ## the quick unit tests, and which share of each file they run: the 20 files with the least, and all
	OMP_NUM_THREADS=1 $(PYTHON_BIN) -m pytest -n 2 --dist loadfile -q -m "not slow" tests/unit --cov --cov-report=
	@$(PYTHON_BIN) -m coverage report | awk 'NR <= 22 || /^TOTAL/'

lint: .venv/.installed ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

trackers: .venv/.installed ## run the tests of tensorboard, wandb and trackio, installed by their extra (about 2 minutes)
	@bash setup/check_trackers.sh

pythons: .venv/.installed ## check every supported Python: wheels of all pins, and two training steps where it is installed
	@bash setup/check_pythons.sh

tiny-model: .venv/.installed ## rebuild the tiny model that is shipped in adora_vl/models/tiny/pretrained (about 6 minutes)
	$(PYTHON_BIN) -m adora_vl.models.tiny --output adora_vl/models/tiny/pretrained

clean-runs: ## delete runs/
	rm -rf runs
