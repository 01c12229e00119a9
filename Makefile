# What CI runs is what you run: make check, make docs, make wheel-test, make test-all; make test leaves out what is long.
# A comment with ## is what `make help` prints.
.DELETE_ON_ERROR:

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
            $$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
HAS_NVIDIA := $(shell command -v nvidia-smi; ls /proc/driver/nvidia/version 2>/dev/null)
TORCH ?= $(if $(HAS_NVIDIA),torch>=2.11$(comma)<2.15,torch==2.13.0)
comma := ,

BIN := .venv/bin
# Named after what was asked for, so that another PYTHON starts anew and another TORCH installs again.
VENV := .venv/python-$(shell echo '$(PYTHON)' | cksum | cut -d' ' -f1)
STAMP := .venv/torch-$(shell echo '$(TORCH)' | cksum | cut -d' ' -f1)
MODEL := cache_dir/models/SmolLM2-135M-Instruct.Q4_1.gguf
LIBRARY := cli common compiler custom_ops models runtime serving testing
KERNELS = $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
# Tests start hundreds of Pythons, each of which would compile the library anew if none kept what it compiled.
unexport PYTHONDONTWRITEBYTECODE
# A worker takes whole files, whose tests share what is compiled for them; one file alone, or ARGS=-n0, starts none.
SIDE_BY_SIDE := --numprocesses auto --dist loadfile --no-loadscope-reorder
QUESTION ?= What is the capital of France, and what is it known for?

.PHONY: help install demo check format test test-all clients-test gpu-test prove mutants docs bench wheel-test cuda clean

help:  ## these lines
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

install: $(STAMP)  ## make .venv with Lamina and the tools

$(VENV):
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with ensurepip found; set PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	@touch $@

$(STAMP): $(VENV) pyproject.toml
	@echo 'installing torch and Lamina into .venv, which takes some minutes'
	@$(BIN)/pip install --progress-bar on --retries 5 "$(TORCH)" --editable '.[dev]'
	@rm -f .venv/torch-* && touch $@

$(MODEL): | $(STAMP)
	$(BIN)/python examples/fetch_demo_model.py $@

demo: $(STAMP) $(MODEL)  ## fetch a small model and ask it QUESTION="…"
	$(BIN)/lamina generate $(MODEL) --chat --temperature 0 --max-tokens 64 "$(QUESTION)"

check: $(STAMP)  ## formatting, types, import direction, spelling, workflows; under a minute
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@$(if $(KERNELS),$(BIN)/clang-format --dry-run --Werror $(KERNELS))
	$(BIN)/codespell
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml

format: $(STAMP)  ## mend what a machine can mend, and write the generated pages and plots
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python docs/write_structures.py
	$(BIN)/python docs/write_settings.py
	$(BIN)/python docs/write_metrics.py
	$(BIN)/python docs/write_factors.py
	$(BIN)/python docs/draw_plots.py
	@$(if $(KERNELS),$(BIN)/clang-format -i $(KERNELS))

test: $(STAMP) $(MODEL)  ## the tests but for the longest; ARGS="tests/runtime -x" picks
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not long" $(ARGS)

test-all: $(STAMP) $(MODEL)  ## these with the longest, which CI runs
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow" $(ARGS)

clients-test: $(STAMP)  ## litellm, langchain-openai and schemathesis against the server; installs them
	$(BIN)/python -m pip install --quiet -e '.[clients]'
	$(BIN)/python -m pytest tests/serving/clients $(ARGS)

gpu-test: $(STAMP)  ## the tests that need an NVIDIA GPU
	$(BIN)/python -m pytest tests/gpu tests/custom_ops/test_launches.py tests/custom_ops/test_autotune.py $(ARGS)

prove: $(STAMP) $(MODEL)  ## the tests with many random examples, and the slow ones; hours
	$(BIN)/python -m pytest --hypothesis-profile=prove --timeout=3600 $(ARGS)

mutants: $(STAMP)  ## break the kernels on purpose and see that tests notice
	$(BIN)/python -m tests.mutants --jobs $$(nproc) $(ARGS)

docs: $(STAMP)  ## build the pages into build/site; a dead link or an unknown name is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

bench: $(STAMP) $(MODEL)  ## measure on this CPU, beside transformers; ARGS reach benchmarks/cpu.py
	$(BIN)/python benchmarks/cpu.py --model $(MODEL) $(ARGS)

wheel-test: $(STAMP) $(MODEL)  ## build the wheel, install it alone and use it
	$(BIN)/python tests/packaging/check_wheel.py $(ARGS)

cuda: $(STAMP)  ## compile the CUDA kernels with nvcc, if it is there; needs no GPU
	@if command -v nvcc || command -v /usr/local/cuda/bin/nvcc || command -v "$$CUDA_HOME/bin/nvcc"; then \
		$(BIN)/python -m lamina.custom_ops $(ARGS); \
	else echo "no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda: the CUDA kernels were not compiled"; fi

clean:  ## remove .venv and what tools leave behind
	rm -rf .venv build dist src/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find $(LIBRARY) benchmarks examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
