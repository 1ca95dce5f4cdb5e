# The front door. `make` alone explains.
.DEFAULT_GOAL := help
.PHONY: help setup check test torture bench lines clean demo demo-rl
PY := .venv/bin/python
# Three test processes share two cores, since many tests wait: threads that wait must not spin.
PYTEST := GOMP_SPINCOUNT=1000 $(PY) -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

help: ## Say what each command does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv and install everything that development needs (nothing when it is current)
	@tools/setup

check: setup checked ## Format, lint, types and unit tests: about a minute
	@$(PYTEST) tests/unit

test: setup ## Everything: what check does, the contract tests against the official SDK, its cookbook, and end to end
	@$(MAKE) --no-print-directory -j 3 checked cookbook postgres kernels
	@$(PYTEST) tests

.PHONY: checked cookbook postgres kernels
checked:
	@.venv/bin/ruff format --check --quiet . || { echo "run .venv/bin/ruff format"; exit 1; }
	@.venv/bin/ruff check --quiet .
	@.venv/bin/mypy

cookbook:
	@tools/cookbook

postgres:
	@tools/postgres

kernels:
	@tools/kernels

torture: setup ## Kill engine and server 100 times under load, and compare with an undisturbed run (a quarter of an hour)
	@tools/official
	@tools/postgres
	@KILLS=200 $(PY) -m pytest -q tests/e2e/test_server_crash.py
	@PYTHONPATH=tests $(PY) -m support.torture --kills 100

demo: setup ## From nothing to a tuned model on this machine, with a report in tinsmith-demo/
	@.venv/bin/tinsmith demo

demo-rl: setup ## The same by reward alone: a model learns to answer rightly and briefly
	@.venv/bin/tinsmith demo --rl

bench: setup ## Benchmarks: wire and client beside the official SDK, server beside FastAPI, engine beside PEFT, durability
	@tools/official
	@$(PY) bench/wire.py
	@$(PY) bench/sdk.py
	@$(PY) bench/server.py
	@$(PY) bench/store.py
	@$(PY) bench/cli.py
	@$(PY) bench/engine.py
	@$(PY) bench/durability.py

lines: ## Lines of code per sub-package, with the change against main
	@tools/lines

clean: ## Remove the environments and caches
	rm -rf .venv .official .pytest_cache .mypy_cache .ruff_cache .hypothesis
