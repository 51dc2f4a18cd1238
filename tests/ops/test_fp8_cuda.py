"""The kernels of fp8 have the bits of the reference in plain torch, on a GPU, for large tensors too."""

import pytest
import torch

from tests.ops.test_fp8 import (
    EVERY_FORMAT,
    EVERY_SCALING,
    FORMATS,
    POW2,
    SCALINGS,
    TABLES,
    WIDE,
    Scaling,
    both,
    codes,
    drawn,
    first,
    is_same,
)
from trainer.ops import native

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
KERNELS_OF = WIDE[:3]


@EVERY_FORMAT
@EVERY_SCALING
@POW2
@pytest.mark.parametrize("wide", KERNELS_OF, ids=str)
def test_kernels_have_the_bits_of_plain_torch(
    scaling: Scaling, dtype: torch.dtype, pow2: bool, wide: torch.dtype
) -> None:
    before = native.csrc_calls().get("fp8_cast", 0)
    shapes = [(128, 128), (384, 1152), (2048, 2048)]
    if scaling in ("tensor", "row"):
        shapes += [(16, 16), (48, 1040), (656, 272)]
    elif scaling == "block":
        shapes += [(16, 128), (656, 640)]
    for shape in shapes:
        x = drawn(*shape, wide, "cuda")
        for bad in (0.0, torch.inf, -torch.nan):
            x[shape[0] // 2, shape[1] // 3] = bad
            want = both(x, scaling, dtype, pow2=pow2, form="torch")
            assert all(map(is_same, both(x, scaling, dtype, pow2=pow2), want))
    assert native.csrc_calls()["fp8_cast"] == before + 3 * len(shapes)
    x = drawn(640, 256, wide, "cuda").view(-1)[8:-248].view(639, 256)
    assert is_same(first(x, scaling, dtype, pow2=pow2), first(x, scaling, dtype, pow2=pow2, form="torch"))


@pytest.mark.parametrize("wide", KERNELS_OF, ids=str)
def test_every_code_and_every_half_way_is_rounded_as_by_torch(wide: torch.dtype) -> None:
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16).float()
    numbers = numbers[numbers.abs() <= 448].to("cuda", wide)
    x = torch.cat([numbers, numbers.new_full((-len(numbers) % 16 + 16,), 448)]).view(1, -1)
    for dtype in FORMATS:
        for scaling in SCALINGS[:2]:
            assert is_same(first(x, scaling, dtype), first(x, scaling, dtype, form="torch"))


@pytest.mark.slow
@EVERY_SCALING
def test_more_elements_than_an_int32_counts(scaling: Scaling) -> None:
    rows, columns = 1 << 16, (1 << 15) + 128
    x = torch.ones(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = 3
    by_row, by_column = both(x, scaling, torch.float8_e4m3fn)
    for got in (by_row, by_column):
        assert codes(got)[-1, -1].item() == TABLES[torch.float8_e4m3fn].index(384.0)
        assert got.scales.max().item() >= 2.0**-7
        ones = codes(got) == TABLES[torch.float8_e4m3fn].index(256.0)
        assert int(ones.sum()) + int((codes(got) == TABLES[torch.float8_e4m3fn].index(128.0)).sum()) == x.numel() - 1
