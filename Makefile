# Isthmus. `make demo` shows it, `make test` checks it; both set up what is missing and can be repeated.
#
#   PYTHON=...      the interpreter to make .venv with; default: the first of python3, python3.13 ... that is 3.10 or later
#   CONSTRAINTS=    for pip: "" takes the newest releases, as `make newest` does; default: -c constraints.txt
#   PIP_FLAGS=...   for pip, e.g. another index (PyTorch's CPU-only wheels for Linux come from an index of their own)
#   PYTEST_FLAGS=   for pytest, e.g. "-n 4 -k zoo"; default: one process more than cores, who is done takes from the others
#   FUZZ_FLAGS=     for the fuzzer, e.g. "--programs 100000 --seed 2 --minutes 40"
#   CHAOS_FLAGS=    for the faults, e.g. "--requests 20000 --seed 2 --json docs/results/chaos.json"
#   ATTACK_FLAGS=   for the attacks, e.g. "--frames 1000000 --seed 2 --minutes 30 --tally attacks.json"
#   SIEGE_FLAGS=    for the siege, e.g. "--cases tiny-flood --who same --json siege.json"
#   RAY_FLAGS=      for Ray Serve, e.g. "--cases killed --times 5 --json ray.json"
#   SOAK_FLAGS=     for the soak, e.g. "--requests 20000 --json soak.json"
#   CAMERA_FLAGS=   for the cameras, e.g. "--kernel linux-image-...-amd64.deb --json cameras.json"
#   FOOTPRINT_FLAGS=  for what an edge takes, e.g. "imports --tries 9 --json docs/results/footprint.json"
#   MATRIX_FLAGS=   for the matrix, e.g. "--models digits bert --json matrix.json"; another machine: docs/agreement.md
#   DEVICE_FLAGS=   for the test device, e.g. "--every --json docs/results/device.json"
#   GPU_PYTHON=     the Python that has torch for the accelerator, default python3; GPU_FLAGS= "--resume", "--wheels DIR"
#   DOORS_FLAGS=    for the doors, e.g. "--json docs/results/doors.json"
#   CLAIMS_FLAGS=   for the claims, e.g. "--only chaos soak" or "--show"
#   MUTATION_FLAGS= for the mutants, e.g. "--faults 50 --seed 2 --covered build/covered"
#   WHEEL_FLAGS=    for the wheel, e.g. "--python python3.10 --python python3.13"
#   CERT_FLAGS=     for the certificates, e.g. "certs --server cloud.example --client edge-1"
#   GENERATION_FLAGS=  for split generation, e.g. "modes --only Llama --json modes.jsonl"
#   COMPOSE_FLAGS=  for the containers, e.g. "--base my/python:3.12 --torch 2.13.0+cpu --profile demo"
#   PAGES=          for docs-update, e.g. "README.md docs/witness.md"; default: all
#   DEMO_FLAGS=     for the demo, e.g. --split stage3.1.bn2

VENV := .venv
PY := $(VENV)/bin/python
RUNTIME := $(VENV)/.installed-runtime
DEV := $(VENV)/.installed-dev
CONSTRAINTS ?= -c constraints.txt
PIP_FLAGS ?=
PYTEST_FLAGS ?= -n auto --dist worksteal
DEMO_FLAGS ?=
COMPOSE_FLAGS ?=
CERT_FLAGS ?=
BENCH_FLAGS ?=
EXPERIMENT_FLAGS ?=
LIBRARY_FLAGS ?=
GENERATION_FLAGS ?= architectures --jobs 2
FUZZ_FLAGS ?=
ATTACK_FLAGS ?=
CHAOS_FLAGS ?=
SIEGE_FLAGS ?=
SOAK_FLAGS ?=
DOORS_FLAGS ?=
DEVICE_FLAGS ?=
GPU_PYTHON ?= python3
GPU_FLAGS ?=
CLAIMS_FLAGS ?=
MUTATION_FLAGS ?= --covered build/covered --json docs/results/mutation.json
WHEEL_FLAGS ?=
RAY_FLAGS ?=
CAMERA_FLAGS ?=
FOOTPRINT_FLAGS ?=
MATRIX_FLAGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help device gpu demo certs test newest pytest lint compose manifests bench fuzz attacks chaos siege soak claims mutation ray cameras matrix footprint doors wheel experiments library generation protos docs docs-update clean

help:
	@echo "make demo    run the shipped model split over two processes on this machine"
	@echo "make certs   an authority, a server's and a client's certificate, for trying TLS: certs/"
	@echo "make test    lint, types, import rules, generated code, tests"
	@echo "make lint    test without the tests; make pytest: the tests alone"
	@echo "make newest  the tests with the newest releases of all packages, or another interpreter: PYTHON=python3.14"
	@echo "make bench   the benchmarks: a table and JSON"
	@echo "make fuzz    random models, cut everywhere, for a long time: a table, failures as source"
	@echo "make chaos   servers, clients and the path between them killed, cut and stopped: a table, what was lost"
	@echo "make attacks hostile requests against a server, for a long time: a table and JSON"
	@echo "make siege   one hostile client beside three honest ones, in every way we know: a table"
	@echo "make footprint  what an edge and a server take: imports, installed size, memory with the head's weights alone"
	@echo "make matrix  edges with other releases of torch and processors (MATRIX_FLAGS) against this server: a table"
	@echo "make soak    100,000 requests and 1,000 reconnects: does anything grow?"
	@echo "make claims  everything the documents promise that make test cannot show, in short forms: one table"
	@echo "make mutation  faults put into the guarding code: which does no test notice? Hours"
	@echo "make doors   tritonclient, curl, Prometheus and OpenTelemetry against a server, each for real"
	@echo "make wheel   wheel and sdist, each installed in a clean environment and tried there"
	@echo "make ray     Ray Serve on a local cluster: latency, replicas, deaths; installs the extra ray (250 MB)"
	@echo "make cameras cameras and streams before edge-client run: GStreamer, RTSP, HTTP, V4L2 (Linux, GStreamer)"
	@echo "make experiments  predictions and moving cuts on a shaped link (root, Linux): tables and JSON"
	@echo "make library the models of transformers, timm and torchvision cut at a sample of their layers; hours"
	@echo "make generation  generate() of the models of transformers split, against the same in one process; an hour"
	@echo "make compose the containers of deploy/docker-compose.yml, built, run, looked into and taken down (a Docker engine)"
	@echo "make manifests  the files for Kubernetes, systemd and Compose, by kubectl, systemd-analyze and Compose"
	@echo "make gpu     whether all runs on this box's accelerator, is exact, and how fast; ten minutes at most, no network"
	@echo "make device  the service and the zoo on a device that is none, built with a C++ compiler"
	@echo "make docs    the site of the documentation: build/site/index.html"
	@echo "make docs-update  what pages show of commands' outputs, as it comes out now"
	@echo "make protos  regenerate the code of the wire"
	@echo "make clean   remove .venv and caches"

demo: $(RUNTIME)
	$(PY) -m deploy.demo $(DEMO_FLAGS)

certs: $(RUNTIME)
	$(PY) -m deploy.certs $(CERT_FLAGS)

test: $(DEV)
	$(MAKE) --no-print-directory -j2 lint pytest

# what is compiled is kept: each process that a test starts would compile the package again
pytest: $(DEV)
	unset PYTHONDONTWRITEBYTECODE; $(PY) -m pytest $(PYTEST_FLAGS)

# in an environment of its own: what pip takes for somebody without our constraints, PYTHON= for another interpreter
newest:
	$(MAKE) --no-print-directory pytest VENV=build/newest CONSTRAINTS=

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(PY) -m protos.generate --check

bench: $(DEV)
	$(PY) -m studies.benchmarks $(BENCH_FLAGS)

fuzz: $(DEV)
	$(PY) -m studies.fuzz $(FUZZ_FLAGS)

attacks: $(DEV)
	$(PY) -m studies.attacks $(ATTACK_FLAGS)
	$(PY) -m studies.attacks.steps --minutes 5
	$(PY) -m studies.attacks.pressure --answers 200
	$(PY) -m studies.attacks.files --files 10000 --minutes 3
	$(PY) -m studies.attacks.tails --minutes 3
	$(PY) -m studies.attacks.servers --minutes 2

chaos: $(DEV)
	$(PY) -m studies.chaos $(CHAOS_FLAGS)

siege: $(DEV)
	$(PY) -m studies.siege $(SIEGE_FLAGS)

soak: $(DEV)
	$(PY) -m studies.soak $(SOAK_FLAGS)

claims: $(DEV)
	$(PY) -m studies.claims $(CLAIMS_FLAGS)

mutation: $(DEV)
	$(PY) -m pip install $(PIP_FLAGS) -q $(CONSTRAINTS) -e ".[mutation]"
	$(PY) -m studies.mutation $(MUTATION_FLAGS)

ray: $(DEV)
	$(PY) -m pip install $(PIP_FLAGS) -q $(CONSTRAINTS) -e ".[ray]"
	$(PY) -m studies.ray $(RAY_FLAGS)

gpu:
	$(GPU_PYTHON) -m studies.gpu $(GPU_FLAGS)

device: $(DEV)
	$(PY) -m studies.device.service
	$(PY) -m studies.device $(DEVICE_FLAGS)

cameras: $(DEV)
	$(PY) -m studies.cameras $(CAMERA_FLAGS)

footprint: $(DEV)
	$(PY) -m studies.footprint $(FOOTPRINT_FLAGS)

matrix: $(DEV)
	$(PY) -m studies.matrix $(MATRIX_FLAGS)

doors: $(DEV)
	$(PY) -m studies.doors $(DOORS_FLAGS)

wheel: $(PY)
	$(PY) -m studies.wheel $(WHEEL_FLAGS)

experiments: $(DEV)
	$(PY) -m studies.experiments all $(EXPERIMENT_FLAGS)

library: $(DEV)
	$(PY) -m studies.library $(LIBRARY_FLAGS)

generation: $(DEV)
	$(PY) -m studies.generation $(GENERATION_FLAGS)

compose: | $(PY)
	$(PY) -m deploy.compose_check $(COMPOSE_FLAGS)

manifests: $(DEV)
	$(PY) -m pip install -q $(PIP_FLAGS) $(CONSTRAINTS) -e ".[manifests]"
	$(PY) -m deploy.manifests_check

protos: $(DEV)
	$(PY) -m protos.generate

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

docs-update: $(DEV)
	$(PY) -m tests.docs.update $(PAGES)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first interpreter that is new enough; the message says what was looked at when there is none.
$(PY):
	@set -e; found=; \
	for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.14 python3.13 python3.12 python3.11 python3.10 python); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "Isthmus needs Python 3.10 or later; $(if $(PYTHON),$(PYTHON),python3) is `$(if $(PYTHON),"$(PYTHON)",python3) --version 2>&1 || true`." >&2; \
	  echo "Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; \
	fi; \
	echo "making $(VENV) with `"$$found" --version`"; \
	"$$found" -m venv --clear $(VENV) || { \
	  rm -rf $(VENV); \
	  echo "$$found cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

# Installing again only when what to install has changed. dev includes runtime.
$(RUNTIME): pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install $(PIP_FLAGS) $(CONSTRAINTS) -e ".[cloud,sweep,onnx,prune,tls]"
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install $(PIP_FLAGS) $(CONSTRAINTS) -e ".[dev]"
	@touch $(RUNTIME) $@
