# Every target works on a fresh machine with Python >= 3.11 and make; nothing needs root.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ENV    := OMP_NUM_THREADS=1 GOMP_SPINCOUNT=0 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false

.PHONY: help env demo demo-full test test-all lint bench clean
help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

env: $(VENV)/.ready  ## the environment: .venv with everything the platform and its tests need
$(VENV)/.ready: pyproject.toml constraints/cpu.txt deploy/bootstrap.py
	@$(PYTHON) deploy/bootstrap.py $(VENV)

demo: env        ## four tenants on one backbone, two learn by reward; a report in var/demo
	@$(ENV) $(BIN)/python examples/demo.py $(ARGS)

demo-full: env   ## PPO in a real simulator, PushCube-v1 (installs ManiSkill, 2 GB); var/demo-full
	@$(ENV) $(BIN)/python examples/demo_full.py $(ARGS)

test: env        ## lint, types and the tests (starts the services they need)
	@$(MAKE) --no-print-directory lint
	$(ENV) $(BIN)/python -m pytest -m "not slow"

test-all: env    ## the same and the tests that take minutes
	@$(MAKE) --no-print-directory lint
	$(ENV) $(BIN)/python -m pytest

lint: env
	$(BIN)/ruff check platform storage tests deploy examples benchmarks
	$(BIN)/ruff format --check platform storage tests deploy examples benchmarks
	$(BIN)/mypy

bench: env       ## make bench NAME=sft_group ARGS=--quick
	@$(ENV) $(BIN)/python benchmarks/$(NAME).py $(ARGS)

clean:           ## remove the environment and all state
	rm -rf $(VENV) var
