# The developer's menu: `make` lists it. Needs python3 (3.11 or newer) with venv, make and a C++ compiler.
# Every target sets up .venv from constraints.txt by itself, and again when what it installs from changes.
#   PYTHON=python3.12         another interpreter (remove .venv first)
#   TORCH_INDEX_URL=<url>     where to take PyTorch from: its CPU index, if the default one serves CUDA builds
#   JOBS=2                    processes that run tests
#   CASES=500 SEED=7          of `make fuzz`: how many cores, and which
#   TESTS="tests/plan"        of `make test-oldest` and `make test-newest`: some of the tests

PYTHON ?= python3
JOBS ?= 2
CASES ?= 10000
BIN := .venv/bin
READY := .venv/.ready
OLDEST_READY := .oldest-venv/.ready
NEWEST_READY := .newest-venv/.ready
REQUIREMENTS := constraints.txt pyproject.toml tests/peers.txt examples/requirements.txt
BENCH_READY := .bench-venv/.ready
DOCS_READY := .docs-venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo examples test test-slow test-full test-oldest test-newest test-gpu fuzz lint format docs docs-check bench bench-gpu clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+: .*## / { printf "make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# $(call fill,<environment>,<constraints>)
# PyTorch first and pinned, so that nothing resolves another build of it; setuptools is pinned too, hence no isolation
define fill
$(call install,$(1),$(2)) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
$(call install,$(1),$(2)) setuptools
$(call install,$(1),$(2)) --no-build-isolation --editable '.[demo,test,lint]'
$(call install,$(1),$(2)) --no-deps --requirement tests/peers.txt --requirement examples/requirements.txt
touch $(1)/.ready
endef
install = $(1)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(2)

$(READY): $(REQUIREMENTS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(call fill,.venv,constraints.txt)

# the oldest PyTorch that is supported, and a setuptools that it takes
$(OLDEST_READY): $(REQUIREMENTS)
	test -x .oldest-venv/bin/python || $(PYTHON) -m venv .oldest-venv
	sed -E 's/^torch==.*/torch==2.11.0/; s/^setuptools==.*/setuptools==81.0.0/' constraints.txt > .oldest-venv/constraints.txt
	$(call fill,.oldest-venv,.oldest-venv/constraints.txt)

# the newest PyTorch that is tested, with the Triton that it brings and the NumPy that this one's interpreter takes
$(NEWEST_READY): $(REQUIREMENTS)
	test -x .newest-venv/bin/python || $(PYTHON) -m venv .newest-venv
	sed -E 's/^torch==.*/torch==2.14.1/; s/^triton==.*/triton==3.8.0/; s/^numpy==.*/numpy==2.4.6/' constraints.txt > .newest-venv/constraints.txt
	$(call fill,.newest-venv,.newest-venv/constraints.txt)

# the peers of the benchmarks live apart: what they pull in must not reach the tests
$(BENCH_READY): benchmarks/requirements.txt benchmarks/setup.sh constraints.txt
	PYTHON=$(PYTHON) PIP_CONSTRAINT=$(CURDIR)/constraints.txt sh benchmarks/setup.sh
	touch $@

# Threads that wait asleep: with more processes than cores, spinning ones would slow small kernels down tenfold
test test-slow test-full test-oldest test-newest test-gpu: export OMP_WAIT_POLICY ?= passive

demo: $(READY) ## train a spiking classifier, fused and eager timed: demo_output/metrics.json and digits.png
	$(BIN)/python examples/digits.py --out demo_output

examples: export OMP_WAIT_POLICY ?= passive
examples: $(READY) ## train every example at full scale (minutes): demo_output/<name>/metrics.json and a picture
	for name in japanese_vowels pig_cvp events_tonic two_compartments lightning_digits shd_like gru_as_a_core; do $(BIN)/python examples/$$name.py || exit; done

test: $(READY) ## the quick tests, two cases of those that have many: 9 minutes on 2 cores
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow and not full and not gpu"

test-slow: $(READY) ## the slow tests, and three more cases of those that have many
	$(BIN)/python -m pytest -n $(JOBS) -m "slow and not full and not gpu" $(TESTS)

test-full: $(READY) ## all tests, of all cases: an hour and more on 2 cores; before a release
	$(BIN)/python -m pytest -n $(JOBS) -m "not gpu"

test-oldest: $(OLDEST_READY) ## `make test` on PyTorch 2.11, the oldest that is supported
	.oldest-venv/bin/python -m pytest -n $(JOBS) -m "not slow and not full and not gpu" $(TESTS)

test-newest: $(NEWEST_READY) ## `make test` on PyTorch 2.14, the newest that is tested
	.newest-venv/bin/python -m pytest -n $(JOBS) -m "not slow and not full and not gpu" $(TESTS)

# what holds on any device, beside the tests that are marked `gpu`; the other files make their operands on the CPU
ANY_DEVICE := $(foreach name,call complex cut default_states derivatives hop inner load lowlevel_ops memory mixing module over_time parity prologue_fusion recurrent rows scan sharding stateless transforms,$(wildcard tests/test_$(name).py tests/*/test_$(name).py))
test-gpu: ## the tests on an NVIDIA GPU, with the python3 that has PyTorch for CUDA, pytest, pytest-xdist and hypothesis
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -p no:benchmark --device cuda -n $(JOBS) -m gpu $$(grep -l mark.gpu -r tests --include 'test_*.py')
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -p no:benchmark --device cuda -n $(JOBS) -m "not gpu" $(ANY_DEVICE)

fuzz: $(READY) ## 10,000 random cores against the eager loop (an hour): CASES=500 fewer, SEED=7 the same again
	$(BIN)/python tools/fuzz.py --cases $(CASES) $(if $(SEED),--seed $(SEED))

lint: $(READY) ## style and limits (ruff), types (mypy), lines of code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/count_lines.py

format: $(READY) ## sort imports, lay out code, apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# what builds the site reads the sources and imports nothing of them
$(DOCS_READY): docs/requirements.txt
	test -x .docs-venv/bin/python || $(PYTHON) -m venv .docs-venv
	.docs-venv/bin/python -m pip --disable-pip-version-check install --quiet --requirement docs/requirements.txt
	touch $@

docs: $(DOCS_READY) ## build the site strictly: site/index.html
	NO_MKDOCS_2_WARNING=1 .docs-venv/bin/mkdocs build --quiet --strict

docs-check: docs $(READY) ## open every page of the site, and a report, in a headless browser (needs chromium)
	mkdir -p build
	$(BIN)/python -m flexsn explain examples/lif.py:lif --html build/explain.html
	$(PYTHON) tools/check_site.py site build/explain.html

bench: $(BENCH_READY) ## measure against the peers (minutes), results in benchmarks/results/
	.bench-venv/bin/python benchmarks/run.py --float64-gate

bench-gpu: ## test and measure on an NVIDIA GPU, with the python3 that has PyTorch for CUDA (minutes)
	PYTHONPATH=. $(PYTHON) benchmarks/gpu.py --output benchmarks/results/gpu_$$(date +%F).json
	PYTHONPATH=. $(PYTHON) benchmarks/network.py --output benchmarks/results/network_$$(date +%F).json

clean: ## remove the environments and everything made
	rm -rf .venv .oldest-venv .newest-venv .bench-venv .docs-venv demo_output build site *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
