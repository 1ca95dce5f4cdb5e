# Development commands; `make` alone lists them.
.DEFAULT_GOAL := help
.PHONY: help setup check test clients wheel-test docs demo demo-rl bench torture soak fuzz mutants lines clean
PY := .venv/bin/python
# Three processes on two cores, because many tests wait. GOMP_SPINCOUNT keeps OpenMP threads that wait from using a core.
PYTEST := GOMP_SPINCOUNT=1000 $(PY) -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

help:
	@awk -F ':.*## ' '/^## / {printf "%s%s\n", (n++ ? "\n" : ""), substr($$0, 4)} \
		/^[a-z-]+:.*## / {printf "  make %-10s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

## Develop
setup: ## Create .venv with everything development needs; does nothing if it is up to date
	@tools/setup

check: setup checked ## Check format, lint and types, and run the unit tests (about a minute)
	@$(PYTEST) tests/unit

test: setup ## Run all tests: also against the official SDK and its cookbook, and end to end
	@$(MAKE) --no-print-directory -j 3 checked platforms cookbook small-clients postgres kernels site
	@$(PYTEST) tests

.PHONY: checked platforms cookbook small-clients postgres kernels site
checked:
	@.venv/bin/ruff format --check --quiet . || { echo "not formatted; run: .venv/bin/ruff format"; exit 1; }
	@.venv/bin/ruff check --quiet .
	@.venv/bin/mypy

# What macOS lacks must not be used anywhere, and what Windows lacks not by the client.
CLIENT := $(addprefix src/tinsmith/,cli client text transport types wire) $(wildcard src/tinsmith/*.py)
platforms:
	@.venv/bin/mypy --platform darwin --cache-dir .mypy_cache/darwin
	@.venv/bin/mypy --platform win32 --cache-dir .mypy_cache/win32 --follow-imports silent $(CLIENT)

cookbook:
	@tools/cookbook

small-clients:
	@tools/clients openai anthropic openapiopenai

postgres:
	@tools/postgres

kernels:
	@tools/kernels

site:
	@tools/docs

docs: setup site ## Build the documentation into site/: searchable, with an API reference, readable offline

clients: setup ## Install programs that others wrote, from lm-eval to axolotl, and run them against a server (minutes, 10 GB)
	@tools/clients
	@$(PY) -m pytest -q tests/clients

wheel-test: setup ## Install the wheel (a new one, or WHEEL=FILE) into an empty environment; run the demo (minutes)
	@PYTHONPATH=tests $(PY) -m support.wheel_trial $(WHEEL)

lines: ## Count lines of code per sub-package, with the change since main
	@tools/lines

clean: ## Delete the virtual environments and caches
	rm -rf .venv .official .clients .docs-venv .docs-build site .pytest_cache .mypy_cache .ruff_cache .hypothesis

## Try it
demo: setup ## Fine-tune a small model on this machine; writes a report to tinsmith-demo/
	@.venv/bin/tinsmith demo

demo-rl: setup ## The same with rewards only: the model learns short, correct answers
	@.venv/bin/tinsmith demo --rl

## Measure and stress (minutes to hours)
bench: setup ## Run the benchmarks: client and wire, server, store, command line, engine, what training learns, durability
	@tools/official
	@$(PY) bench/wire.py
	@$(PY) bench/sdk.py
	@$(PY) bench/server.py
	@$(PY) bench/openai.py
	-@tools/clients llama-cpp
	@$(PY) bench/openai_peers.py
	@$(PY) bench/store.py
	@$(PY) bench/cli.py
	@$(PY) bench/engine.py
	@$(PY) bench/defaults.py
	@$(PY) bench/durability.py

KILLS ?= 100
torture: setup ## Kill engine and server KILLS=100 times under load; compare with an undisturbed run
	@tools/official
	@tools/postgres
	@KILLS=200 $(PY) -m pytest -q tests/e2e/test_server_crash.py
	@PYTHONPATH=tests $(PY) -m support.torture --kills $(KILLS)

soak: setup ## Run SOAK_MINUTES=30 of faulty clients; memory, descriptors, rows and files must not grow
	@PYTHONPATH=tests $(PY) -m support.soak

fuzz: setup ## Send FUZZ=1000000 generated requests to all routes (about 15 minutes)
	@PYTHONPATH=tests $(PY) -m support.fuzz --requests $(or $(FUZZ),1000000)

mutants: setup ## Introduce bugs on purpose and check that tests fail (about 15 minutes)
	@tools/official
	@PYTHONPATH=tests $(PY) -m support.mutants
