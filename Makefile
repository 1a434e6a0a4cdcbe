# make demo   the main job on the embedded default: installs, makes data, trains, evaluates, sums up
# make test   lint, types and all tests
.PHONY: demo test unit lint setup tiny-model clean-runs help
SHELL := /bin/bash
PYTHON_BIN := .venv/bin/python
LAUNCH := .venv/bin/accelerate launch
DEMO := runs/demo

help:
	@sed -n 's/^# //p' Makefile

setup: .venv/.installed

.venv/.installed: setup/install.sh setup/build-tools.txt setup/constraints-cpu.txt setup/constraints-gpu.txt setup/torchvision_cpu_ops.py pyproject.toml
	@bash setup/install.sh

demo: .venv/.installed
	@bash setup/demo.sh $(DEMO)

lint: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# Two at a time with one thread each: the tiny model gains nothing from a second thread, and engines take long to start.
test: lint
	OMP_NUM_THREADS=1 $(PYTHON_BIN) -m pytest -n 2 --dist loadfile

unit: .venv/.installed
	$(PYTHON_BIN) -m pytest tests/unit

# Rebuilds the tiny model that is shipped in adora_vl/models/tiny/pretrained (about 6 minutes on 2 cores).
tiny-model: .venv/.installed
	$(PYTHON_BIN) -m adora_vl.models.tiny --output adora_vl/models/tiny/pretrained

clean-runs:
	rm -rf runs
