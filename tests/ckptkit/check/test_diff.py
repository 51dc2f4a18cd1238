"""Diff: what differs between two checkpoints, compared with a slow reference that knows one element at a time."""

import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.check.diff import CheckpointDifference, Tolerance, compare, diff_checkpoints
from ckptkit.loading.reader import CheckpointReader
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import ITEMSIZE, Placement, TensorInfo
from ckptkit.rewrite.reshard import reshard
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.numbers import LAYERS, NUMPY, exact, layouts, random_array, tables
from threefold.errors import CheckFailed, UserError
from threefold.storage import Storage, open_storage
from threefold.storage.memory import MemoryStorage

ROOT = Path(__file__).parents[3]
SMALL_SLAB = 1 << 20


def written(
    tensors: list[TensorInfo], arrays: Mapping[str, np.ndarray], layout: ParallelLayout, step: int = 1
) -> Storage:
    storage = MemoryStorage()
    write_checkpoint(storage, step, layout, LAYERS, tensors, arrays)
    return storage


def diff(left: Storage, right: Storage, **options: object) -> CheckpointDifference:
    with CheckpointReader(left, 1) as first, CheckpointReader(right, 1) as second:
        return diff_checkpoints(first, second, **options)  # type: ignore[arg-type]


def one(array: object, dtype: str = "F32") -> Storage:
    """A checkpoint of one tensor."""
    elements = np.asarray(array, NUMPY[dtype])
    info = TensorInfo("weight", dtype, elements.shape, Placement("first"))
    return written([info], {"weight": elements}, ParallelLayout())


def norm(numbers: list[int | float]) -> float:
    return math.sqrt(math.fsum(float(each) ** 2 for each in numbers))


@settings(max_examples=25)
@given(tensors=tables(), left=layouts, right=layouts, seed=st.integers(0, 1 << 30))
def test_the_same_tensors_are_equal_in_any_two_layouts(
    tensors: list[TensorInfo], left: ParallelLayout, right: ParallelLayout, seed: int
) -> None:
    arrays = {info.name: random_array(info.dtype, info.shape, seed) for info in tensors}
    found = diff(written(tensors, arrays, left), written(tensors, arrays, right), slab_bytes=SMALL_SLAB)
    assert found.is_equal
    assert len(found.tensors) == len(tensors)
    assert found.facts.keys() == ({"layout"} if left != right else set())
    assert all(each.found.num_differing == 0 and each.found.norm == 0 for each in found.tensors)


@settings(max_examples=25)
@given(tensors=tables(), left=layouts, right=layouts, seed=st.integers(0, 1 << 30), data=st.data())
def test_one_changed_element_is_found_with_its_index(
    tensors: list[TensorInfo], left: ParallelLayout, right: ParallelLayout, seed: int, data: st.DataObject
) -> None:
    arrays = {info.name: random_array(info.dtype, info.shape, seed) for info in tensors}
    filled = [info for info in tensors if info.numel and info.dtype != "BOOL"]
    if not filled:
        return
    info = data.draw(st.sampled_from(filled))
    place = data.draw(st.integers(0, info.numel - 1))
    changed = arrays[info.name].copy()
    changed.reshape(-1).view(f"u{ITEMSIZE[info.dtype]}")[place : place + 1] ^= 1
    found = diff(written(tensors, arrays, left), written(tensors, arrays | {info.name: changed}, right))
    [tensor] = found.differing
    assert not found.is_equal
    assert (tensor.name, tensor.found.num_differing) == (info.name, 1)
    assert found.tensors[0] == tensor, "what differs comes first"
    for largest in (tensor.found.absolute, tensor.found.relative):
        assert tensor.index(largest) == [int(each) for each in np.unravel_index(place, info.shape)]
    before, after = (exact(array, info.dtype)[place] for array in (arrays[info.name], changed))
    assert tensor.found.absolute
    assert tensor.found.absolute.value == pytest.approx(float(abs(before - after)), nan_ok=True)


def reference(left: list[int | float], right: list[int | float], same: list[bool]) -> tuple[int, float, float]:
    """How many elements differ, and the largest absolute and relative difference; NaN is the largest of all."""
    absolute, relative = [], []
    for a, b, is_same in zip(left, right, same, strict=True):
        if not is_same:
            apart = float(abs(a - b))
            absolute.append(apart)
            if apart == 0 or not math.isfinite(apart):
                relative.append(apart)
            else:
                relative.append(apart / max(abs(float(a)), abs(float(b))))
    largest = [
        math.nan if any(map(math.isnan, each)) else max(each, default=-1.0) for each in (absolute, relative)
    ]  # fmt: skip
    return len(absolute), largest[0], largest[1]


@given(dtype=st.sampled_from(sorted(NUMPY)), size=st.integers(0, 60), seed=st.integers(0, 1 << 30), data=st.data())
def test_elements_are_compared_as_the_reference_does(dtype: str, size: int, seed: int, data: st.DataObject) -> None:
    left, right = random_array(dtype, (size,), seed), random_array(dtype, (size,), seed)
    for place in data.draw(st.lists(st.integers(0, max(size - 1, 0)), max_size=20)) if size else ():
        right[place] = random_array(dtype, (1,), data.draw(st.integers(0, 1 << 30)))[0]
    raw = [array.view(np.uint8) for array in (left, right)]
    same = [a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True)]
    count, absolute, relative = reference(exact(left, dtype), exact(right, dtype), same)
    comparison = compare(raw, (dtype, dtype), 1000, None)
    assert comparison.num_differing == count
    if count:
        assert comparison.absolute
        assert comparison.relative
        assert comparison.absolute.value == pytest.approx(absolute, nan_ok=True)
        assert comparison.relative.value == pytest.approx(relative, nan_ok=True)
        assert not same[comparison.absolute.position - 1000]
    for array, value in ((left, comparison.left_norm), (right, comparison.right_norm)):
        numbers = exact(array, dtype)
        if all(abs(each) < 1e150 for each in numbers):
            assert value == pytest.approx(norm(numbers), rel=1e-9)
        elif any(math.isnan(each) for each in numbers):
            assert math.isnan(value)


NAN, OTHER_NAN = (np.array([bits], np.uint32).view(np.float32)[0] for bits in (0x7FC00000, 0x7FC00001))
TINY = np.float32(1e-45)  # the smallest subnormal


@pytest.mark.parametrize(
    ("left", "right", "absolute", "relative"),
    [
        (NAN, NAN, None, None),
        (NAN, OTHER_NAN, math.nan, math.nan),
        (NAN, 1.0, math.nan, math.nan),
        (math.inf, math.inf, None, None),
        (math.inf, -math.inf, math.inf, math.inf),
        (math.inf, 3.0, math.inf, math.inf),
        (0.0, -0.0, 0.0, 0.0),
        (0.0, TINY, float(TINY), 1.0),
        (-1.0, 1.0, 2.0, 2.0),
    ],
)
def test_values_that_are_special(left: float, right: float, absolute: float | None, relative: float | None) -> None:
    for shape in ((), (1, 1)):
        arrays = [np.full(shape, each, np.float32) for each in (left, right)]
        difference = diff(*map(one, arrays))
        assert difference.is_equal == (absolute is None)
        largest = difference.tensors[0].found
        for each, value in ((largest.absolute, absolute), (largest.relative, relative)):
            assert (each is None) == (value is None)
            assert each is None or each.value == pytest.approx(value, nan_ok=True)
            assert difference.tensors[0].index(each) == (None if each is None else [0] * len(shape))


def test_whole_numbers_differ_exactly() -> None:
    least, most = -(2**63), 2**63 - 1
    for left, right, apart in ((least, most, 2.0**64), (2**60, 2**60 + 1, 1.0), (most, most - 1, 1.0)):
        found = diff(one([left], "I64"), one([right], "I64")).tensors[0].found
        assert found.absolute
        assert found.absolute.value == apart


def test_another_dtype_is_a_difference_unless_values_alone_are_compared() -> None:
    whole, half = np.array([1.0, -2.5, 3.0], np.float32), np.array([0x3F80, 0xC020, 0x4040], np.uint16)
    left, right = one(whole), one(half, "BF16")
    difference = diff(left, right)
    assert not difference.is_equal
    assert difference.tensors[0].dtypes == ("F32", "BF16")
    assert difference.tensors[0].found.num_differing == 0
    assert diff(left, right, tolerance=Tolerance()).is_equal
    difference = diff(left, one(half + np.array([0, 1, 0], np.uint16), "BF16"), tolerance=Tolerance())
    assert difference.tensors[0].index(difference.tensors[0].found.absolute) == [1]
    assert diff(one([1, 2], "I32"), one([1.0, 2.0], "F64"), tolerance=Tolerance()).is_equal


def test_tolerances() -> None:
    left, right = one([1.0, 100.0, -0.0, np.inf]), one([1.001, 100.1, 0.0, np.inf])
    assert diff(left, right).differing[0].found.num_differing == 3
    assert diff(left, right, tolerance=Tolerance()).differing[0].found.num_differing == 2
    assert diff(left, right, tolerance=Tolerance(absolute=0.01)).differing[0].found.num_differing == 1
    assert diff(left, right, tolerance=Tolerance(relative=0.0011)).is_equal
    assert diff(right, left, tolerance=Tolerance(relative=0.0011)).is_equal
    huge = Tolerance(1e300, 1e300)
    assert not diff(one([np.inf]), one([1.0]), tolerance=huge).is_equal
    assert not diff(one([np.nan]), one([1.0]), tolerance=huge).is_equal


def test_norms_beyond_the_range_of_squares() -> None:
    for size in (1e-200, 1e200):
        found = diff(one([3 * size, 0.0], "F64"), one([3 * size, 4 * size], "F64")).tensors[0].found
        assert (found.left_norm, found.right_norm) == pytest.approx((3 * size, 5 * size))
        assert found.norm == pytest.approx(4 * size)


def test_tensors_that_cannot_be_compared_are_named() -> None:
    tensors = gpt_tensors(LAYERS)
    arrays = values(tensors)
    others = [replace(info, shape=(8, 32)) if info.name == "layers.1.attn.q.weight" else info for info in tensors[1:]]
    others.append(TensorInfo("new.weight", "F32", (3,), Placement("last")))
    found = diff(written(tensors, arrays, ParallelLayout(tp=2)), written(others, values(others), ParallelLayout()))
    assert found.only_left == ("embed.weight",)
    assert found.only_right == ("new.weight",)
    assert found.shapes == {"layers.1.attn.q.weight": ((16, 16), (8, 32))}
    assert len(found.tensors) == len(tensors) - 2
    with pytest.raises(UserError, match=r"no tensor is named x\* or y"):
        diff(one([1.0]), one([1.0]), only=("x*", "y"))
    assert diff(one([1.0]), one([1.0]), only=("w*",)).is_equal


@pytest.mark.parametrize("changed", [False, True])
def test_a_tied_tensor_has_the_values_of_another(changed: bool) -> None:
    tied, untied = gpt_tensors(1, tied=True), gpt_tensors(1)
    arrays = values(tied)
    head = arrays["embed.weight"] + changed
    free = arrays | {info.name: np.zeros(info.shape, np.float32) for info in untied if info.name not in arrays}
    free["head.weight"] = head
    found = diff(written(tied, arrays, ParallelLayout()), written(untied, free, ParallelLayout(tp=2)), only=("[!o]*",))
    assert [each.name for each in found.differing] == (["head.weight"] if changed else [])
    again = diff(written(tied, arrays, ParallelLayout()), written(tied, arrays, ParallelLayout(pp=2)))
    assert again.is_equal
    assert "head.weight" not in [each.name for each in again.tensors], "its bytes were compared once"


def test_a_reshard_is_equal_and_each_byte_is_read_once(tmp_path: Path) -> None:
    tensors = gpt_tensors(LAYERS, hidden=128, ffn=264, vocab=9001)
    source = open_storage(tmp_path / "a")
    write_checkpoint(source, 1, ParallelLayout(tp=2, dp=2), LAYERS, tensors, values(tensors))
    with CheckpointReader(source, 1) as left:
        reshard(left, open_storage(tmp_path / "b"), ParallelLayout(tp=4, pp=2, dp=2))
    with CheckpointReader(source, 1) as left, CheckpointReader(open_storage(tmp_path / "b"), 1) as right:
        done = []
        found = diff_checkpoints(left, right, slab_bytes=SMALL_SLAB, progress=lambda *each: done.append(each))
        for reader in (left, right):
            assert reader.bytes_read <= sum(part.data_bytes for part in reader.root.parts)
    assert found.is_equal
    assert done[-1] == (sum(info.size_bytes for info in tensors),) * 2


@pytest.mark.parametrize("side", [0, 1])
def test_damage_is_met_and_the_hint_names_its_run(tmp_path: Path, side: int) -> None:
    tensors = gpt_tensors(LAYERS)
    storages = [open_storage(tmp_path / name) for name in ("a", "b")]
    for storage in storages:
        write_checkpoint(storage, 1, ParallelLayout(), LAYERS, tensors, values(tensors))
    path = next((tmp_path / "ab"[side]).rglob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckFailed, match="is damaged between bytes") as caught:
        diff(storages[0], storages[1])
    assert caught.value.hint == f"ckptkit ls {storages[side].url}"


MEASURE = """
import re, sys
from ckptkit.check.diff import diff_checkpoints
from ckptkit.loading.reader import CheckpointReader
from threefold.storage import open_storage
def peak():
    return int(re.search(r"VmHWM:[^0-9]*([0-9]+) kB", open("/proc/self/status").read())[1]) << 10
def diff(name):
    with CheckpointReader(open_storage(sys.argv[1] + name), 1) as left:
        with CheckpointReader(open_storage(sys.argv[1] + name), 1) as right:
            assert diff_checkpoints(left, right, slab_bytes=8 << 20).is_equal
diff("/small")
before = peak()
diff("/large")
print(peak() - before)
"""


@pytest.mark.ci
@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    for name, rows in (("small", 4), ("large", 80_000)):
        info = TensorInfo("weight", "F32", (rows, 1024), Placement("first"))
        write_checkpoint(
            open_storage(tmp_path / name), 1, ParallelLayout(dp=2), 1, [info], {"weight": np.ones(info.shape, "f4")}
        )
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=200)
    assert int(done.stdout) < 4 * (8 << 20) + (96 << 20) < 320 << 20
