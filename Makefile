# Needs: Python 3.10 to 3.13, pip, git, make. Everything is installed into .venv; nothing else on the machine changes.
#
#   make demo    a real training on a Monarch mesh, live on the screen
#   make test    lint, types and all tests but those that make test-nightly adds
#   make test-nightly     the same with long tests, the real torchrun, the image, examples by chance, fresh ranks, shared imports, and make soak
#   make record-torchrun  record what torchrun does, which `make test` compares with, and show what is new
#   make check   the quick part of it (under 3 minutes), for while you work
#   make test-newest      the part that depends on torch, with the newest torch, TorchX and Monarch that pip finds
#   make test-gpu         ranks on GPUs, where there are some and a CUDA build of torch
#   make soak    300 small jobs with faults in each, and 100 runs on one allocation; half an hour
#   make bench   launch times beside torchrun, TorchX and Monarch (make bench-slurm: beside a bare sbatch)
#   make docs    the site of the documentation, in site/; make docs-pages and docs-pictures write what it is made from
#   make dist    the wheel and the source archive of a release: the same commit makes the same bytes
#   make release-check TAG=vX.Y.Z  the same, installed and run in clean environments, with release-notes.md from CHANGELOG.md
#   make hashes  write packaging/requirements.txt: constraints.txt with the hashes of PyPI's files, for --require-hashes
#   make clean   remove what the above made
#
#   make slurm-up, make slurm-down    the cluster of the tests to work with by hand: eval "$(make -s slurm-up)"
#   make docker-up, make docker-down  the same with the Docker daemon of the tests (needs root, as Slurm does)
#   make ssh-up, make ssh-down        three machines with OpenSSH servers, in namespaces (needs root, as Slurm does)
#   make kubernetes-up, make kubernetes-down  the same with their API server; it is built once, in some minutes
#   make aws_batch-up, make aws_batch-down    the same with moto's AWS, whose jobs are containers of such a daemon

VENV ?= .venv
BIN := $(CURDIR)/$(VENV)/bin
# What is installed: first the package and its examples, then also what the tests need.
RUN := $(VENV)/.installed
STAMP := $(VENV)/.installed-tests
TEST_EXTRAS := docker,kubernetes,aws,examples,test,docs,dev
# The first supported interpreter that answers (a pyenv shim may stand on PATH and still refuse), by its full path and
# never one of a virtual environment, which the rules below may be about to replace.
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do "$$p" -c 'import sys; \
	(3, 10) <= sys.version_info[:2] <= (3, 13) or sys.exit(1); print(sys._base_executable)' 2>/dev/null && break; done)
endif

# A job's command names `python` and `torchrun`: they must be the ones of this environment.
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where it is set, each process of pytest compiles all tests anew, some seconds, and each host this package.
unexport PYTHONDONTWRITEBYTECODE

PYTESTFLAGS ?=
RECORDFLAGS ?=
BENCHFLAGS ?=
SOAKFLAGS ?=

# Debian's packages that tests need beyond Python's; see `system` below.
SYSTEM_PACKAGES := iproute2 openssl fuse3 chromium task-spooler

# The option table against torchrun's parser, programs beside torchrun, and what uses torch's own functions.
NEWEST ?= tests/unit/test_options.py tests/unit/test_command.py tests/local/test_numa.py tests/local/test_digits.py \
	tests/local/test_watchdog.py tests/local/test_monarch_job.py tests/local/test_actors_beside_ranks.py \
	tests/local/test_private_files.py tests/unit/test_clients.py tests/conformance

CLUSTERS := slurm docker ssh kubernetes aws_batch

.PHONY: $(CLUSTERS:%=%-up) $(CLUSTERS:%=%-down) help venv system demo test test-newest test-nightly test-gpu record-torchrun check soak bench bench-slurm dist release-check hashes docs docs-pages docs-pictures lint types format clean

help:
	@sed -n 's/^#   //p' Makefile

venv: $(RUN)

# pip says nothing unless it fails.
install = said=$$("$(BIN)/python" -m pip install -q -c constraints.txt $(1) 2>&1) || { echo "$$said"; exit 1; }

# Debian packs ensurepip apart from Python (python3-venv); where it is missing, the system's pip fills the environment.
$(RUN): setup.cfg pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.13 on PATH. Install one, or name it: make PYTHON=/path/to/python"; exit 1; }
	@echo "Installing torch, Monarch and TorchX into $(VENV): some minutes, the first time."
	@if "$(PYTHON)" -c 'import ensurepip' 2>/dev/null; then \
		"$(PYTHON)" -m venv --clear "$(VENV)"; \
	else \
		"$(PYTHON)" -m venv --clear --without-pip "$(VENV)" && \
		"$(PYTHON)" -m pip --python "$(BIN)/python" install -q -c constraints.txt pip; \
	fi
	@$(call install,pip setuptools)
	@$(call install,-e '.[examples]')
	@touch $@

$(STAMP): $(RUN)
	@echo "Installing what the tests need into $(VENV)."
	@$(call install,-e '.[$(TEST_EXTRAS)]')
	@touch $@

# Where they are missing and may not be installed, the tests that need them skip and say why.
system:
	@command -v ip >/dev/null && command -v openssl >/dev/null && command -v fusermount3 >/dev/null && command -v chromium >/dev/null && command -v tsp >/dev/null || { test "$$(id -u)" = 0 && \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
		$(SYSTEM_PACKAGES) >/dev/null; } || echo "not installed: $(SYSTEM_PACKAGES); the tests over networks, of mounts, of the example backend and of the report in a browser will skip"

# Without constraints, in an environment of its own; pip's own configuration decides which build of torch that is. Of
# Monarch it takes pre-releases, which the bound in setup.cfg does not allow.
# CONTRIBUTING.md has its latest outcome.
test-newest: system
	"$(PYTHON)" -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install -q --upgrade pip
	.venv-newest/bin/python -m pip install -q --upgrade -e '.[examples,test]' torch torchx-nightly
	.venv-newest/bin/python -m pip install -q --upgrade --pre --no-deps torchmonarch
	.venv-newest/bin/python -m pip list | grep -i '^torch'
	PATH="$(CURDIR)/.venv-newest/bin:$$PATH" python -m pytest --torchrun live $(NEWEST) $(PYTESTFLAGS)

# With the environment's own torch, which constraints.txt pins without naming a build: pip's configuration decides that.
test-gpu: $(STAMP)
	python -m pytest tests/gpu $(PYTESTFLAGS)

demo: $(RUN)
	@echo "A training on 4 ranks. It first waits some seconds for the import of torch, once for all ranks."
	torchx run -s monarch_local --wait --log monarch.spmd --nproc 4 --name digits examples/digits.py --fresh
	@echo
	@echo "Three things to try next, after  . $(VENV)/bin/activate"
	@echo "  torchx monarch report last -o digits.html"
	@echo "  torchx run -s monarch_local --wait --log monarch.spmd -j 2x2 examples/digits.py --fresh"
	@echo "  torchx run -s monarch_local monarch.hosts -j 1x4    # then, with its handle, as often as you like:"
	@echo "  torchx monarch exec HANDLE -- torchrun --nproc-per-node 4 examples/digits.py --fresh"

lint: $(STAMP)
	ruff check .
	ruff format --check .
	python -m docs.tools.budget
	python -m docs.tools.contracts

types: $(STAMP)
	mypy

format: $(STAMP)
	ruff check --fix .
	ruff format .

# tests/unit/test_repository.py checks the types, beside other tests.
# Every cluster of the tests has a worker of its own, which mostly waits, and runs tests of the other workers at the end.
# The first command compiles the tests once, and not once in each worker.
test: lint system
	@python -m pytest --collect-only -qq $(PYTESTFLAGS) >/dev/null || :
	python -m pytest -n 8 $(PYTESTFLAGS)

# What costs more than it is worth for every change: the real torchrun instead of what was recorded, examples by chance.
test-nightly: lint system
	python -m pytest -n 5 --torchrun live --image --nightly --hypothesis-profile nightly $(PYTESTFLAGS)
	python -m pytest -n 5 --ranks fresh tests/conformance $(PYTESTFLAGS)
	python -m pip install -q -c constraints.txt torchft-nightly transformers lightning accelerate deepspeed
	python -m pytest --nightly tests/local/test_pipeline.py tests/local/test_examples.py $(PYTESTFLAGS)
	python -m tests.survey
	$(MAKE) soak

# After a change of the conformance tests, or of torch.
record-torchrun: $(STAMP)
	python -m tests.conformance.record $(RECORDFLAGS)

check: lint
	python -m pytest tests/unit $(PYTESTFLAGS)
	d=$$(mktemp -d) && { torchx run -s monarch_local --wait --log monarch.spmd --nproc 2 --name check \
		examples/digits.py --epochs 4 --min-accuracy 0.8 --checkpoint-dir "$$d"; rc=$$?; rm -rf "$$d"; exit $$rc; }

soak: $(STAMP)
	python -m tests.soak $(SOAKFLAGS)
	MONARCH_TEST_RUNS=100 python -m pytest -q tests/local/test_live.py -k many_runs

bench: $(STAMP)
	python bench/launch.py $(BENCHFLAGS)

bench-slurm: $(STAMP)
	python bench/slurm.py $(BENCHFLAGS)

# Needs no network. site/index.html can be opened as it is.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

# After a change of options, components or commands: a test compares these pages with the code.
docs-pages: $(STAMP)
	python -m docs.tools.reference

# After a measurement (bench/recorded) or a change of what a run shows. The sessions are real ones, so they take a minute.
docs-pictures: $(STAMP)
	python bench/chart.py
	python -m docs.tools.record_terminal
	python -m docs.tools.report_pictures

$(CLUSTERS:%=%-up): %-up: $(STAMP)
	@python -m tests.clusters up $*

$(CLUSTERS:%=%-down): %-down: $(STAMP)
	@python -m tests.clusters down $*

dist: $(STAMP)
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) python -m build --no-isolation

# The demo's command from the wheel, then from the source archive, in an environment as a user has it, with each of these
# Pythons: make release-check TAG=vX.Y.Z RELEASE_PYTHONS="python3.10 python3.11 python3.12 python3.13"
RELEASE_PYTHONS ?= $(PYTHON)
LOAD_ENTRY_POINTS := from importlib import metadata; \
	[point.load() for point in metadata.distribution('torchx-monarch').entry_points]
release-check: $(STAMP)
	python -m tools.release $(TAG)
	$(MAKE) dist
	python -m pip install -q -c constraints.txt twine
	python -m twine check --strict dist/*
	set -e; for python in $(RELEASE_PYTHONS); do \
		"$$python" -m venv --clear .venv-release; \
		for archive in $(CURDIR)/dist/*.whl $(CURDIR)/dist/*.tar.gz; do \
			echo "== $$("$$python" --version), $$(basename "$$archive")"; \
			.venv-release/bin/python -m pip uninstall -q -y torchx-monarch; \
			.venv-release/bin/python -m pip install -q -c constraints.txt "$$archive[examples]"; \
			.venv-release/bin/python -m pip check; \
			(cd .venv-release && PATH="$$PWD/bin:$$PATH" && python -c "$(LOAD_ENTRY_POINTS)" && torchx run -s monarch_local \
				--wait --log monarch.spmd --nproc 4 --name digits "$(CURDIR)/examples/digits.py" --fresh); \
		done; \
	done

# For all Pythons and both kinds of processors, torch for CUDA, as PyPI has it, and the extras of the submitting side.
hashes: $(RUN)
	python -m pip install -q uv
	uv pip compile setup.cfg --universal --python-version 3.10 --generate-hashes --no-annotate --quiet \
		--constraints constraints.txt --extra docker --extra kubernetes --extra aws --default-index https://pypi.org/simple \
		--custom-compile-command "make hashes" --output-file packaging/requirements.txt

clean:
	rm -rf $(VENV) .venv-newest .venv-survey .venv-release release-notes.md build dist site *.egg-info digits-checkpoints .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
