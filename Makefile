# Every target makes its own environment in .venv; only Python 3.11 or newer is asked of the machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
export OMP_NUM_THREADS := 1

.PHONY: help demo test lint types bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   prove that examples/bytelm trains the same under FSDP2, on 2 CPU ranks"
	@echo "make test   lint, types and all tests"
	@echo "make bench  step time beside hand-written FSDP2, accelerate and Fabric; memory of building"
	@echo "make clean  remove the environment and all outputs"

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardfit needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/shardfit parity examples/bytelm/train.py examples/bytelm/train_fsdp2.py \
	  --ranks 2 --steps 20 --resume-at 10 --resume-ranks 2 4 --resume-args=--resume \
	  --html out/bytelm-parity.html -- --save-every 10 --eval-every 10

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest -n 3 --dist loadfile

$(VENV)-bench/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[bench]'
	@touch $@

RANKS ?= 2
bench: $(VENV)-bench/.installed
	$(VENV)-bench/bin/torchrun --standalone --nproc-per-node $(RANKS) benchmarks/step.py --size s34
	$(VENV)-bench/bin/torchrun --standalone --nproc-per-node $(RANKS) benchmarks/step.py --size bytes
	$(VENV)-bench/bin/python benchmarks/build_memory.py

clean:
	rm -rf $(VENV) $(VENV)-bench out build dist
