# make demo   a local cluster of one prefill and one decode node answers real prompts
# make gang   the same with gangs of two ranks, which share the experts
# make test   lint, type checks and the CPU test suite
# make mutants   apply known mistakes one by one; a test must fail for each
# make image-test   build the image and run it like the pods of deploy/ (root, podman, buildah)
# make numerics   numerical tests with every instruction set of this processor
# make soak   the slow tests, make numerics, and kernels with other versions of Triton
# make docs   build the documentation site in build/site
# make reference   regenerate the pages in docs/reference/ from the code
# make checkpoint   train the shipped checkpoint again (about 80 minutes on two cores)

# What can be set, as in `make test TORCH_CPU_INDEX=`:
# TORCH_CPU_INDEX   where torch's CPU build comes from on machines without a GPU, instead of the CUDA
#                   build of several gigabytes; nothing: whatever pip finds
# WORKERS           how many processes run tests

# A cluster has many processes that import the same modules, so their bytecode is kept.
export PYTHONDONTWRITEBYTECODE :=

# Processes that run tests: two more than cores, for what waits. Interpreted kernels never wait and
# have another process meanwhile.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n + 2 : 4)))

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# GPU kernels are tested without a GPU, in a separate process.
INTERPRETED := $(addprefix tests/unit/test_,drawing.py fp8.py gqa.py kernels.py libraries.py router_ties.py staging.py)

.PHONY: torch-for-cpu demo gang test image-test mutants numerics tritons soak lint proto docs reference checkpoint clean

TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# The Triton versions that the CUDA builds of the oldest and the newest supported PyTorch pin.
TRITONS := 3.6.0 3.7.1

$(READY): pyproject.toml deploy/constraints.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install -q --upgrade pip
	@$(MAKE) -s torch-for-cpu
	$(VENV)/bin/pip install -q -e '.[dev]' -c deploy/constraints.txt
	@command -v $${CXX:-g++} >/dev/null && $(PY) -m tandem.model.kernels.build || true
	touch $(READY)

torch-for-cpu:
	@if [ -z "$(TORCH_CPU_INDEX)" ] || ls /dev/nvidia[0-9]* >/dev/null 2>&1; then exit 0; fi; \
	if $(PY) -c "from urllib.request import urlopen; urlopen('$(TORCH_CPU_INDEX)/torch/', timeout=10)" \
		>/dev/null 2>&1; \
	then $(VENV)/bin/pip install -q $(TORCH) --index-url $(TORCH_CPU_INDEX); \
	else echo "$(TORCH_CPU_INDEX) cannot be reached: torch comes from where pip finds it"; fi

demo: $(READY)
	$(PY) -m benchmarks.demo

gang: $(READY)
	$(PY) -m benchmarks.demo --set prefill.dp_size=2 --set decode.dp_size=2

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m tests.prose
	$(VENV)/bin/mypy
	$(VENV)/bin/hadolint deploy/Containerfile

# Files in the order of their names: those that start clusters come first and share the time.
test: lint
	@log=$$(mktemp); TRITON_INTERPRET=1 $(PY) -m pytest $(INTERPRETED) > $$log 2>&1 & kernels=$$!; \
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder; all=$$?; \
	wait $$kernels; kernels=$$?; echo "interpreted kernels:"; cat $$log; rm $$log; \
	echo "exit codes: $$all, interpreted kernels: $$kernels"; [ $$all = 0 ] && [ $$kernels = 0 ]

image-test: $(READY)
	$(PY) -m tests.image

mutants: $(READY)
	$(PY) -m tests.mutants

# Test the GPU kernels with each supported Triton version, interpreted and compiled.
tritons: $(READY)
	@set -e; for version in $(TRITONS); do \
	echo "Triton $$version"; folder=build/triton-$$version; \
	test -d $$folder || $(VENV)/bin/pip install -q --no-deps --target $$folder triton==$$version; \
	PYTHONPATH=$$folder $(PY) -m pytest -n $(WORKERS) tests/unit/test_gpu_compiles.py tests/unit/test_gpu_guards.py; \
	PYTHONPATH=$$folder TRITON_INTERPRET=1 $(PY) -m pytest -n $(WORKERS) $(INTERPRETED); done

# Restrict PyTorch's kernels and ours to default, AVX2 and AVX-512, as far as the CPU has them.
numerics: $(READY)
	$(PY) -m tests.numerics

soak: tritons numerics
	$(VENV)/bin/pip install -q -e '.[soak]'
	$(PY) -m pytest -m slow -n 2 --dist loadfile
	TRITON_INTERPRET=1 $(PY) -m pytest -m slow -n 2 $(INTERPRETED) tests/unit/test_gpu_engine.py

proto: $(READY)
	$(PY) -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src --grpc_python_out=src \
		tandem/cluster/proto/tandem.proto
	sed -i '1i # mypy: ignore-errors' cluster/proto/tandem_pb2_grpc.py

# A broken link or anchor fails, and so does a page that loads anything from another host.
docs: $(READY)
	$(VENV)/bin/pip install -q -e '.[docs]' -c deploy/constraints.txt
	$(PY) -m tests.site

reference: $(READY)
	$(PY) -m tests.reference

checkpoint: $(READY)
	$(PY) -m training.train --state build/training --max-minutes 67
	$(PY) -m training.tune_drafts --continuations 768
	$(PY) -m training.report --state build/training

clean:
	rm -rf $(VENV) build *.egg-info
