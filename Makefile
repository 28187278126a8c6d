# Verbs of the project. `make` alone lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Another wheel index for torch only, e.g. the one with CPU or CUDA builds that fits your machine.
TORCH_INDEX ?=
STAMP := $(VENV)/.setup-$(shell cat pyproject.toml constraints.txt scripts/setup.sh 2>/dev/null | cksum | cut -d' ' -f1)
NODE_STAMP := tests/node/node_modules/.package-lock.json
PYTEST := $(BIN)/python -P -m pytest
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup up test test-slow test-browser test-docs test-compose test-release test-kubernetes test-llamacpp dist check format bench bench-routing bench-simulator bench-engine bench-peers proof storm chaos soak sidechannel coverage mutants docs site fuzz-http clean

help: ## list the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

$(STAMP):
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH_INDEX="$(TORCH_INDEX)" scripts/setup.sh
	@rm -f $(VENV)/.setup-*; touch $@

$(NODE_STAMP): tests/node/package-lock.json
	@scripts/setup.sh node
	@touch $@

setup: $(STAMP) $(NODE_STAMP) ## make the virtual environment and everything that the other verbs need

up: $(STAMP) ## a local cluster on a real model: http://127.0.0.1:8000 (ARGS="--workers 2 --fake" passes flags)
	@exec $(BIN)/headwater up $(ARGS)

test: setup ## unit, contract, property and integration tests
	@scripts/test.sh $(BIN)/python $(ARGS)

test-slow: setup ## property tests with thirty times as many examples
	HEADWATER_TEST_DEPTH=30 $(PYTEST) tests/properties tests/gateway/test_feeds_replica.py --timeout 3600 $(ARGS)

test-browser: setup site ## the report, the dashboard and the documentation in headless Chromium, which it installs (HEADWATER_PICTURES=DIR keeps pictures)
	@scripts/setup.sh browser
	$(PYTEST) tests/browser -m browser $(ARGS)

test-docs: setup ## the slower commands of the documentation, and its first steps with the real model
	$(PYTEST) tests/docs -m docs --timeout 900 $(ARGS)

test-compose: setup ## build and run compose.yaml for real (needs docker compose)
	$(PYTEST) tests/compose -m compose $(ARGS)

test-release: setup ## build wheels twice, install them where nothing else is, run two versions side by side (needs the history)
	$(PYTEST) tests/release -m release $(ARGS)

test-kubernetes: setup ## manifests and Helm chart against the schemas of Kubernetes; fetches Helm (HELM=PATH: another)
	PYTHON=$(BIN)/python scripts/kubernetes_tools.sh $(VENV)/kubernetes
	HEADWATER_KUBERNETES_TOOLS=$(abspath $(VENV)/kubernetes) $(PYTEST) tests/kubernetes -m kubernetes $(ARGS)

dist: $(STAMP) ## wheel, sdist and checksums of what is committed, in dist/: the same bytes everywhere
	@PYTHON=$(BIN)/python scripts/dist.sh dist

coverage: $(STAMP) ## branches of the pure modules that the tests without processes take
	@scripts/coverage.sh $(BIN)/python $(ARGS)

MUTANTS ?= 40
mutants: $(STAMP) ## do the tests notice a fault in the router, the cost, the block pool, the hashes? (MUTANTS=40 of each; ARGS=paging: of modules named so)
	@scripts/mutants.sh $(BIN)/python $(MUTANTS) $(ARGS)

check: $(STAMP) ## lint, format, strict types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config pyproject.toml

format: $(STAMP) ## apply the formatter and the safe fixes of the linter
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## the measured figures of README.md, on this machine (minutes)
	$(BIN)/python -P bench/ttft.py
	$(BIN)/python -P bench/conversations.py --conversations 7,8 --workers 2
	$(BIN)/python -P bench/conversations.py --conversations 20 --workers 4 --fake

bench-routing: $(STAMP) ## the routing goals on public traces, beside other policies (20 minutes)
	$(BIN)/python -P bench/routing.py $(ARGS)

bench-simulator: $(STAMP) ## does headwater simulate agree with an independent simulation (10 minutes; ARGS="--only tau")
	$(BIN)/python -P bench/simulator.py $(ARGS)

bench-engine: $(STAMP) ## the worker's speed beside transformers and llama.cpp (an hour; ARGS="--only a,b --rounds 1")
	$(BIN)/python -P bench/engine.py $(ARGS)

PEERS_OUT ?= build/peers.jsonl
PEERS_ARGS = overhead --rounds 5 --secs 1 --only ours,nginx-rr,sglang-cache,vllm-cache
bench-peers: $(STAMP) ## a request's cost beside nginx and other routers, which it installs (10 minutes; ARGS="routing --seeds 1")
	@venvs=$$(PYTHON="$(PYTHON)" scripts/peers.sh $(BENCH_VENVS)) || exit 1; \
	BENCH_VENVS="$$venvs" BENCH_PYTHON="$(abspath $(BIN))/python" $$venvs/base/bin/python bench/peers/bench.py $(if $(ARGS),$(ARGS),$(PEERS_ARGS)) --out "$(PEERS_OUT)" && \
	$(BIN)/python -P bench/peers/report.py "$(PEERS_OUT)"

LLAMACPP_PYTHON ?=
test-llamacpp: $(STAMP) ## two real llama.cpp servers behind the gateway, beside round-robin (fails if they cannot be had)
	@python="$(LLAMACPP_PYTHON)"; [ -n "$$python" ] || python=$$(PYTHON="$(PYTHON)" scripts/llamacpp_server.sh) || exit 1; \
	$(BIN)/python -P bench/llamacpp.py --python "$$python" --check $(ARGS)

proof: setup ## greedy output against transformers, cached answers against uncached ones, seeded ones against themselves (about 20 minutes)
	$(BIN)/python -P bench/equality.py
	$(BIN)/python -P bench/same_text.py
	$(BIN)/python -P bench/seed.py

MINUTES ?= 30
storm: $(STAMP) ## random load with faults, invariants checked after every step (MINUTES=30)
	$(BIN)/python -P bench/storm.py --minutes $(MINUTES) $(ARGS)

CHAOS_MINUTES ?= 3
chaos: $(STAMP) ## everything around a gateway breaks under load: nothing may be lost or leak (CHAOS_MINUTES=3)
	$(BIN)/python -P bench/chaos.py --minutes $(CHAOS_MINUTES) $(ARGS)

SOAK_MINUTES ?= 60
soak: $(STAMP) ## an hour at 70 % load with light faults: what is held must not grow (SOAK_MINUTES=60)
	$(BIN)/python -P bench/soak.py --minutes $(SOAK_MINUTES) $(ARGS)

sidechannel: $(STAMP) ## can a tenant tell from timing what another one sent? with isolation and without (2 minutes)
	$(BIN)/python -P bench/sidechannel.py $(ARGS)

docs: $(STAMP) ## regenerate what is made from the code: references, schemas, OpenAPI documents
	$(BIN)/python -P -m shared.configdoc docs/configuration.md gateway.config:GatewayConfig worker.config:WorkerConfig
	$(BIN)/python -P -m gateway.ledgerdoc docs/ledger.md
	$(BIN)/python -P -m gateway.doctor.page docs/doctor.md
	$(BIN)/python -P -m gateway.openapi.write gateway/openapi docs/http.md
	$(BIN)/python -P -m shared.clidoc docs/cli.md
	$(BIN)/python -P -m shared.metricsdoc docs/metrics.md "A gateway=gateway.metricsdoc:families" "A worker=worker.metricsdoc:families"

site: $(STAMP) ## the documentation as a site in build/site, strictly: a warning or a broken link fails it
	@scripts/setup.sh site
	$(BIN)/python scripts/site.py build/docs
	$(BIN)/zensical build --strict --clean
	@echo "look at it: $(BIN)/python -m http.server -b 127.0.0.1 -d build/site 8080"

fuzz-http: setup ## requests made from the OpenAPI document against a running fake cluster (schemathesis)
	@scripts/setup.sh fuzz
	$(PYTEST) tests/fuzz -m fuzz --timeout 900 $(ARGS)

clean: ## remove what the other verbs made here
	rm -rf $(VENV) tests/node/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
