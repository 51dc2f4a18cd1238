"""Every op's tests run on the CPU and, where there is one, on a GPU; some under each instruction set of the CPU."""

from collections.abc import Iterator

import pytest
import torch

from trainer.ops import native

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["rms", "layer"])
def norm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def every_simd() -> Iterator[list[int]]:
    """Limits to run under, one after the other, through `native.library().op_limit_simd`."""
    library = native.library()
    yield list(range(library.op_simd() + 1))
    library.op_limit_simd(len(native.SIMD_NAMES) - 1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A test that wants more says so: on a busy machine threads wait for each other for seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
