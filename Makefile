# make demo: the whole job on this machine.  make test: the fast tests.  Each does all its own set-up, in .venv.
#
# TORCH is what pip installs where `$(PYTHON)` cannot import torch itself. The default is the release this is tested
# with; where pip would choose a CUDA build that you do not want, name a CPU wheel: make demo TORCH=path/to/torch.whl
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := $(wildcard csrc/*.cpp csrc/*/*)

.PHONY: demo test test-all lint setup native clean

demo: $(READY)
	$(BIN)/python examples/demo.py --output demo-out

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

# An importable torch is used as it is (the environment then sees the system's packages); else $(TORCH) is installed.
$(READY): pyproject.toml CMakeLists.txt $(NATIVE)
	test -x $(BIN)/python || { \
	  if $(PYTHON) -c "import torch" 2>/dev/null; \
	  then $(PYTHON) -m venv --system-site-packages $(VENV); \
	  else $(PYTHON) -m venv $(VENV); fi; }
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[test]"
	touch $@

# The three native libraries, rebuilt into the source tree in a second: for work on csrc/.
native:
	cmake -S . -B build/native -DTHREEFOLD_INPLACE=ON
	cmake --build build/native --parallel

clean:
	rm -rf build demo-out $(VENV) datakit/_native.so ckptkit/_native.so trainer/_native.so
