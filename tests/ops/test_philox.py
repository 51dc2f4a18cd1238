"""Philox against its published vectors, and normals by counter against plain torch and the normal distribution."""

import ctypes
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.support.normals import normal_reference
from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.philox import normal_, philox4x32, tensor_key

# the known answers of the Random123 distribution for philox4x32-10: counter, key, random words
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("counter", "key", "random"), KNOWN_ANSWERS)
def test_known_answers(counter: list[int], key: list[int], random: list[int]) -> None:
    assert list(philox4x32(counter, *key)) == random
    tensors = philox4x32([torch.tensor(word) for word in counter], *key)
    assert [int(word) for word in tensors] == random
    found = (ctypes.c_uint32 * 4)()
    native.library().op_philox((ctypes.c_uint32 * 4)(*counter), (ctypes.c_uint32 * 2)(*key), found)
    assert list(found) == random


@given(data=st.data())
def test_a_box_equals_the_reference_bit_for_bit(data: st.DataObject) -> None:
    whole = data.draw(st.lists(st.integers(1, 30), min_size=0, max_size=4), label="global shape")
    offset = [data.draw(st.integers(0, size)) for size in whole]
    shape = [data.draw(st.integers(0, size - start)) for size, start in zip(whole, offset, strict=True)]
    box = normal_(torch.empty(shape, dtype=torch.float64), 11, "a", whole, offset)
    assert torch.equal(box, normal_reference(11, "a", whole, offset, shape))
    cut = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    assert torch.equal(box, normal_(torch.empty(whole, dtype=torch.float64), 11, "a")[cut])


def test_indices_beyond_32_bits() -> None:
    whole, offset, shape = (300_000, 70_000), (299_990, 12), (10, 300)
    box = normal_(torch.empty(shape, dtype=torch.float64), 3, "wide", whole, offset)
    assert torch.equal(box, normal_reference(3, "wide", whole, offset, shape))


def test_the_weights_of_this_version() -> None:
    """Runs are compared across versions by their start: a change of these numbers is a change of the format."""
    found = normal_(torch.empty(4, dtype=torch.float64), 1234, "layers.0.attn.q.weight", (2**20,), (70_000,))
    assert found.tolist() == WEIGHTS
    assert tensor_key(1234, "layers.0.attn.q.weight") == KEY


KEY = 0x1DC61E5ABA229D34
WEIGHTS = [0.47998292313134006, -0.47846261793838196, 1.6392154835697486, 0.06948087414078351]


def test_equals_box_and_muller_with_library_functions() -> None:
    count = 200_000
    got = normal_(torch.empty(count, dtype=torch.float64), 5, "x")
    key = tensor_key(5, "x")
    zero = torch.zeros(count, dtype=torch.int64)
    w0, w1, w2, w3 = philox4x32([torch.arange(count), zero, zero, zero], key & 0xFFFFFFFF, key >> 32)
    u = (2 * (w1 << 20 | w0 >> 12) + 1).double() * 2.0**-53
    turns = (w3 << 22 | w2 >> 10).double() * 2.0**-54 - 1 / 8  # the quarters are centred on the axes
    want = torch.sqrt(-2 * u.log()) * torch.cos(2 * math.pi * turns)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)


def test_the_distribution_is_normal() -> None:
    count = 2_000_000
    z = normal_(torch.empty(count, dtype=torch.float64), 8, "embed.weight")
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((z**power).mean()) - moment) < 5 * math.sqrt(variance / count)
    ordered = z.sort().values
    steps = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    distance = float((torch.special.ndtr(ordered) - steps).abs().max())
    assert distance < 1.95 / math.sqrt(count)  # Kolmogorov and Smirnov, one in a thousand
    assert abs(float((z[1:] * z[:-1]).mean())) < 5 / math.sqrt(count)
    assert float(z.abs().max()) < 8.6


def test_names_and_seeds_give_unrelated_numbers() -> None:
    count = 100_000
    streams = [
        normal_(torch.empty(count, dtype=torch.float64), seed, name)
        for seed, name in ((1, "a"), (2, "a"), (1, "b"), (2**64 - 1, "a"))
    ]
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(4)
    assert float(correlation.abs().max()) < 5 / math.sqrt(count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_scale_and_device(dtype: torch.dtype, device: str) -> None:
    exact = 0.02 * normal_reference(4, "w", (20, 33), (0, 0), (20, 33))
    tensor = torch.empty(20, 33, dtype=dtype, device=device)
    assert normal_(tensor, 4, "w", std=0.02) is tensor
    want = exact if dtype == torch.float64 else exact.float().to(dtype)
    assert torch.equal(tensor.cpu(), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cut_box_has_the_same_bits_on_each_device(dtype: torch.dtype, device: str) -> None:
    whole, offset, shape = (11, 130, 9, 300), (2, 5, 0, 17), (7, 61, 9, 283)
    want = normal_reference(3, "w", whole, offset, shape)
    found = normal_(torch.empty(shape, dtype=dtype, device=device), 3, "w", whole, offset)
    assert torch.equal(found.cpu(), want if dtype == torch.float64 else want.float().to(dtype))


def test_bits_do_not_depend_on_threads_or_the_instruction_set(every_simd: list[int]) -> None:
    torch.set_num_threads(1)
    want = normal_(torch.empty(500, 700), 9, "t", (1000, 2000), (7, 8))
    for simd in every_simd:
        native.library().op_limit_simd(simd)
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            assert torch.equal(normal_(torch.empty(500, 700), 9, "t", (1000, 2000), (7, 8)), want)


def test_fills_parameters_and_strided_tensors() -> None:
    want = normal_(torch.empty(6, 10), 2, "p")
    parameter = torch.nn.Parameter(torch.empty(6, 10))
    assert torch.equal(normal_(parameter, 2, "p"), want)
    assert parameter.requires_grad
    assert torch.equal(normal_(torch.empty(10, 6).T, 2, "p"), want)


@pytest.mark.parametrize(
    ("shape", "whole", "offset"),
    [((2, 3), (4, 4), (0, 2)), ((2, 3), (4, 4), (-1, 0)), ((2, 3), (4,), (0,)), ((2, 3), (4, 4), (0,))],
)
def test_a_box_outside_is_refused(shape: tuple[int, ...], whole: tuple[int, ...], offset: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"box \[2, 3\] at .* does not lie in head.weight"):
        normal_(torch.empty(shape), 0, "head.weight", whole, offset)


def test_other_bad_arguments_are_named() -> None:
    with pytest.raises(UserError, match="the seed is -1"):
        normal_(torch.empty(2), -1, "a")
    with pytest.raises(UserError, match=r"not torch\.int64"):
        normal_(torch.empty(2, dtype=torch.int64), 0, "a")
