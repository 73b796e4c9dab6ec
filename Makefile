# make demo   a local cluster of one prefill and one decode node answers real prompts
# make test   lint, types and the whole CPU test suite
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo test lint proto clean

$(READY): pyproject.toml
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install -q --upgrade pip
	$(VENV)/bin/pip install -q -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(PY) -m benchmarks.demo

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	$(PY) -m pytest

proto: $(READY)
	$(PY) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. cluster/tandem.proto
	sed -i '1i # mypy: ignore-errors' cluster/tandem_pb2_grpc.py

clean:
	rm -rf $(VENV) build *.egg-info
