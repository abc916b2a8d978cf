# The two commands of the README are `make quickstart` and `make test`; the rest serves development.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
APT := libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1

.PHONY: quickstart test test-slow test-light slow-tools test-slurm test-sglang sglang-cpu lint install clean slurm-up slurm-down

quickstart: $(STAMP)
	$(BIN)/gyre submit recipes/quickstart.toml --local

test: $(STAMP) lint
	-bash scripts/system-packages squashfs-tools  # to build the SIF images of tests, which skip without it
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow"

HARNESSES := claude-code@2.1.220 claude-code@2.1.332 codex@0.171.0 qwen-code@0.15.10 \
	opencode@1.18.33 mini-swe-agent@2.4.6
# for its trajectory models alone, which need pydantic; the rest of it needs Python 3.12
HARBOR := $(VENV)/harbor

# one heavy stack at a time: runs and Megatron, then SGLang, which leaves a core to what needs neither
LIGHT := $(addprefix tests/,executions harnesses protocol proxy scheduling simulate views)
test-slow: slow-tools
	-bash scripts/system-packages python3-pytest  # the small tasks' own tests want it in /usr
	-bash scripts/apptainer  # tests of its sandbox skip without it
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout 900 tests --ignore tests/sglang $(LIGHT:%=--ignore %)
	$(MAKE) -j2 --output-sync=target test-sglang test-light

test-light: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout 900 $(LIGHT)

# what the slow tier runs that is neither Debian's nor a test's: harnesses, Harbor, SGLang; downloads, for the most part
slow-tools: $(STAMP)
	for harness in $(HARNESSES); do $(BIN)/gyre harness install $$harness; done
	[ -d $(HARBOR) ] || $(BIN)/pip install -q --no-deps --ignore-requires-python --target $(HARBOR) harbor==0.26.0
	$(BIN)/gyre engine install sglang

test-slurm: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout 900 tests/slurm

# real SGLang on CPU, in an environment of its own
sglang-cpu: $(STAMP)
	$(BIN)/gyre engine install sglang

test-sglang: sglang-cpu
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout 900 tests/sglang

lint: $(STAMP)
	$(BIN)/ruff check gyre tests recipes
	$(BIN)/ruff format --check -q gyre tests recipes
	$(BIN)/mypy gyre

install: $(STAMP)

# torch first: a plain `torch` would bring a build for GPUs, several GB of it
$(STAMP): pyproject.toml scripts/system-packages
	bash scripts/system-packages $(APT)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -e ".[train,mooncake-cpu,sandbox,test]"
	touch $(STAMP)

# a real Slurm on this machine: 2 CPU nodes, 4 GPU nodes with fake GPUs (as root)
slurm-up:
	slurm/cluster start
	@slurm/cluster env

slurm-down:
	slurm/cluster stop

clean:
	rm -rf $(VENV)
