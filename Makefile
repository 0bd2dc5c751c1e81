# make demo   trains the example GPT on 4 local processes and on one, and compares their losses
# make test   all tests
# Both create .venv if there is none. PYTHON=... chooses the interpreter, VENV=... another environment.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
STEPS ?= 100
OUT := examples/gpt/out
TRAIN := examples/gpt/train.py --steps $(STEPS)
BIN := $(VENV)/bin

.PHONY: demo test venv

# One thread a process, in both runs: more threads than cores would only wait for each other.
demo: venv
	$(BIN)/python -m pip install --quiet -e ".[examples]"
	mkdir -p $(OUT) && rm -f $(OUT)/four.json $(OUT)/one.json
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 $(TRAIN) \
		--mesh data=2,model=2 --layout tp --losses $(OUT)/four.json --plot $(OUT)/loss.png
	OMP_NUM_THREADS=1 $(BIN)/python $(TRAIN) --sample 0 --losses $(OUT)/one.json --plot $(OUT)/loss-one.png
	$(BIN)/python examples/gpt/compare.py $(OUT)/one.json $(OUT)/four.json --tolerance 1e-4

test: venv
	$(BIN)/python -m pip install --quiet -e ".[test,examples]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -x -q tests

# The CPU build of torch where pip's indexes have it, else what they have; nothing if a torch is there already.
venv:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet "torch==$(TORCH)+cpu" \
		|| $(BIN)/python -m pip install --quiet "torch==$(TORCH)"
