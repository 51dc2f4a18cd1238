"""Stats: counts, ranges and moments compared with those of whole arrays; the page that shows them."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.check.elements import BLOCK_ELEMENTS
from ckptkit.check.inspect import describe
from ckptkit.check.stats import HEIGHT, TensorStatistics, bars, render_statistics, statistics_of, tensor_statistics
from ckptkit.loading.reader import CheckpointReader
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Placement, TensorInfo
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.numbers import LAYERS, NUMPY, exact, layouts, random_array, tables
from threefold.errors import UserError
from threefold.storage.memory import MemoryStorage


def assert_describes(statistics: TensorStatistics, numbers: list[int | float]) -> None:
    finite = [each for each in numbers if math.isfinite(each)]
    assert statistics.num_elements == len(numbers)
    assert statistics.num_nan == sum(map(math.isnan, numbers))
    assert statistics.num_inf == sum(map(math.isinf, numbers))
    assert statistics.num_zero == finite.count(0)
    assert (statistics.min, statistics.max) == (min(finite, default=None), max(finite, default=None))
    assert sum(statistics.magnitudes.values()) == len(finite) - finite.count(0)
    for exponent, count in statistics.magnitudes.items():
        if exponent > -1000:
            assert count == sum(2.0**exponent <= abs(float(each)) < 2.0 * 2.0**exponent for each in finite)
    if not finite:
        assert statistics.std is None
    elif not any(finite) or 1e-140 < max(map(abs, finite)) < 1e140:  # whose squares are numbers of float64
        mean = math.fsum(finite) / len(finite)
        slack = 1e-9 * float(max(map(abs, finite)))
        assert statistics.mean == pytest.approx(mean, rel=1e-9, abs=slack)
        assert statistics.std == pytest.approx(
            math.sqrt(math.fsum((each - mean) ** 2 for each in finite) / len(finite)), abs=slack
        )
        assert statistics.norm == pytest.approx(math.sqrt(math.fsum(float(each) ** 2 for each in finite)), rel=1e-9)


@settings(max_examples=25)
@given(tensors=tables(), layout=layouts, seed=st.integers(0, 1 << 30))
def test_statistics_are_those_of_whole_arrays(tensors: list[TensorInfo], layout: ParallelLayout, seed: int) -> None:
    arrays = {info.name: random_array(info.dtype, info.shape, seed) for info in tensors}
    storage = MemoryStorage()
    write_checkpoint(storage, 1, layout, LAYERS, tensors, arrays)
    with CheckpointReader(storage, 1) as reader:
        found = tensor_statistics(reader, slab_bytes=1 << 20)
    assert list(found) == [info.name for info in tensors]
    for info in tensors:
        assert_describes(found[info.name], exact(arrays[info.name], info.dtype))


@given(
    dtype=st.sampled_from(sorted(NUMPY)), cuts=st.lists(st.integers(0, 50), max_size=4), seed=st.integers(0, 1 << 30)
)
def test_blocks_are_joined_in_any_cut(dtype: str, cuts: list[int], seed: int) -> None:
    array = random_array(dtype, (50,), seed)
    joined = TensorStatistics()
    for part in np.split(array, sorted(cuts)):
        joined += statistics_of(part.view(np.uint8), dtype)
    assert_describes(joined, exact(array, dtype))


def test_many_blocks_whose_mean_is_far_from_zero() -> None:
    array = np.random.default_rng(0).normal(1e6, 1e-2, 3 * BLOCK_ELEMENTS + 5)
    info, storage = TensorInfo("weight", "F64", array.shape, Placement("first")), MemoryStorage()
    write_checkpoint(storage, 1, ParallelLayout(dp=3), 1, [info], {"weight": array})
    with CheckpointReader(storage, 1) as reader:
        found = tensor_statistics(reader, slab_bytes=1 << 20)["weight"]
    assert found.std == pytest.approx(array.std(), rel=1e-6)
    assert found.mean == pytest.approx(array.mean(), rel=1e-14)


def test_values_at_the_ends_of_the_range() -> None:
    found = statistics_of(np.array([1.7e308, 1.7e308, 5e-324]).view(np.uint8), "F64")
    assert found.mean == pytest.approx(1.7e308 / 1.5)
    assert found.magnitudes == {1023: 2, -1023: 1}
    document = statistics_of(np.array([np.nan, -np.inf]).view(np.uint8), "F64").to_json()
    assert (document["nan"], document["inf"], document["min"], document["mean"], document["std"]) == (1, 1) + (
        None,
    ) * 3


def test_tied_tensors_are_read_once_and_patterns_choose() -> None:
    tensors, storage = gpt_tensors(1, tied=True), MemoryStorage()
    write_checkpoint(storage, 1, ParallelLayout(tp=2), 1, tensors, values(tensors))
    with CheckpointReader(storage, 1) as reader:
        assert "head.weight" not in tensor_statistics(reader)
        assert set(tensor_statistics(reader, only=["*norm1*", "norm*"])) == {
            f"{prefix}{name}.weight"
            for prefix, name in (
                ("", "norm"), ("", "layers.0.norm1"), ("optim.exp_avg/", "layers.0.norm1"),
                ("optim.exp_avg_sq/", "layers.0.norm1"),
            )
        }  # fmt: skip
        with pytest.raises(UserError, match="no tensor is named nothing"):
            tensor_statistics(reader, only=["nothing"])


def test_the_page_shows_every_tensor_and_needs_nothing_else() -> None:
    pytest.importorskip("jinja2", reason="needs jinja2: pip install -e '.[plot]'")
    names = ["a<b>&'\"", "empty", "of zeros", "of nan"]
    arrays = dict(zip(names, ([0.5, -3.0, 3.5], [], [0.0, -0.0], [np.nan, np.inf]), strict=True))
    infos = [TensorInfo(name, "F32", (len(data),), Placement("first")) for name, data in arrays.items()]
    storage = MemoryStorage("memory://<i>")
    write_checkpoint(storage, 1, ParallelLayout(), 1, infos, {n: np.array(a, np.float32) for n, a in arrays.items()})
    with CheckpointReader(storage, 1) as reader:
        about, statistics = describe(reader.root, reader.url), tensor_statistics(reader)
    page = render_statistics(about, statistics)
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert page.count("<svg") == page.count("</svg>") == len(names)
    assert "a&lt;b&gt;&amp;&#39;&#34;" in page
    assert "<b>" not in page
    assert "<i>" not in page
    assert "1 NaN, 1 Inf." in page
    assert "from 2<sup>-1</sup> to 2<sup>2</sup>" in page
    assert not re.findall(r"src=|href=|<script|http", page)
    assert page == render_statistics(about, statistics)


def test_the_page_of_a_checkpoint_without_tensors() -> None:
    pytest.importorskip("jinja2", reason="needs jinja2: pip install -e '.[plot]'")
    storage = MemoryStorage()
    root = write_checkpoint(storage, 1, ParallelLayout(), 1, [], {})
    assert "</html>" in render_statistics(describe(root, "here"), {})


def test_bars_are_as_high_as_the_logarithm_of_their_counts() -> None:
    assert bars({0: 1, 2: 1000}, 0, 1000) == f"M0,{HEIGHT}v-4h3v4zM8,{HEIGHT}v-{HEIGHT}h3v{HEIGHT}z"
    assert bars({}, 0, 1) == ""
