# make demo   a local cluster of one prefill and one decode node answers real prompts
# make gang   the same with gangs of two ranks, which share the experts
# make test   lint, types and the whole CPU test suite
# make mutants   known mistakes, each alone, which a test has to notice (minutes)
# make soak   the slow tests, which make test leaves out
# make checkpoint   train the shipped checkpoint again (about 80 minutes on two cores)

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# Kernels for GPUs are tested in a process of their own, without one.
INTERPRETED := $(addprefix tests/unit/test_,fp8.py kernels.py router_ties.py staging.py)

.PHONY: demo gang test mutants soak lint proto checkpoint clean

$(READY): pyproject.toml
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install -q --upgrade pip
	$(VENV)/bin/pip install -q -e '.[dev]'
	-$(PY) -m model.kernels.build
	touch $(READY)

demo: $(READY)
	$(PY) -m benchmarks.demo

gang: $(READY)
	$(PY) -m benchmarks.demo --set prefill.dp_size=2 --set decode.dp_size=2

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	@$(PY) -m pytest -n 3 --dist loadfile; all=$$?; \
	TRITON_INTERPRET=1 $(PY) -m pytest -n 3 $(INTERPRETED); kernels=$$?; \
	echo "exit codes: $$all, interpreted kernels: $$kernels"; [ $$all = 0 ] && [ $$kernels = 0 ]

mutants: $(READY)
	$(PY) -m tests.mutants

soak: $(READY)
	$(PY) -m pytest -m slow
	TRITON_INTERPRET=1 $(PY) -m pytest -m slow tests/unit/test_gpu_engine.py

proto: $(READY)
	$(PY) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. cluster/proto/tandem.proto
	sed -i '1i # mypy: ignore-errors' cluster/proto/tandem_pb2_grpc.py

checkpoint: $(READY)
	$(PY) -m training.train --state build/training --max-minutes 67
	$(PY) -m training.tune_drafts --state build/training --continuations 768 --max-minutes 13
	$(PY) -m training.report --state build/training

clean:
	rm -rf $(VENV) build *.egg-info
