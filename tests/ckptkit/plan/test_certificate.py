"""Certificate: it changes with names, dtypes, shapes and sums, and what was written again is compared with it."""

from dataclasses import replace

import numpy as np
import pytest

from ckptkit.format.root import Root
from ckptkit.model.chunk_table import TensorColumns
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Placement, TensorInfo
from ckptkit.plan.certificate import KIND, TensorSums, differing, digest, is_readable, joined
from threefold.errors import CheckFailed

W = TensorInfo("w", "F32", (2, 3), Placement(0))
V = TensorInfo("v", "BF16", (4,), Placement(0))
TIED = TensorInfo("t", "F32", (2, 3), Placement(0, tied_to="w"))
TABLE = [W, V, TIED]
COLUMNS = TensorColumns.of([V, W])
ROOT = Root(1, "a", ParallelLayout(), 1, {info.name: info for info in TABLE}, (), {})


def sums(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def test_a_digest_is_of_name_dtype_shape_and_sum() -> None:
    found = {digest(W, 5), digest(W, 6), digest(replace(W, name="x"), 5), digest(replace(W, dtype="I32"), 5),
             digest(replace(W, shape=(3, 2)), 5), digest(replace(W, shape=(6,)), 5)}  # fmt: skip
    assert len(found) == 6
    assert digest(W, 5) == digest(replace(W, placement=Placement(7)), 5)


def test_sums_of_parts_are_joined_in_any_order() -> None:
    one, other = TensorSums(TABLE), TensorSums(TABLE)
    one.add(np.array([1, 0]), sums(1, 2))
    one.add(np.array([0]), sums(7))
    other.add(np.array([0, 1]), sums(7, 1))
    other.add(np.array([0]), sums(2))
    assert one.certificate() == other.certificate() == {"sums": KIND, "tensors": {"w": digest(W, 5), "v": digest(V, 1)}}
    other.add(np.array([0]), None)
    assert other.certificate() is None


def test_only_certificates_of_this_kind_are_read() -> None:
    certificate = TensorSums(TABLE).certificate()
    assert is_readable(certificate)
    assert not any(map(is_readable, (None, {}, {"by": "somebody"}, {"sums": KIND, "tensors": []})))
    assert differing(certificate, {"tensors": {"w": digest(W, 1), "x": ""}}) == ["v", "w", "x"]


def test_what_was_written_again_is_equal_to_what_was_saved_or_refused() -> None:
    written = [(COLUMNS, sums(1, 2)), (COLUMNS, sums(0, 3))]
    own, is_equal = joined(ROOT, written, "a copy")
    assert not is_equal
    assert own == {"sums": KIND, "tensors": {"w": digest(W, 1), "v": digest(V, 1)}}
    root = replace(ROOT, certificate=own)
    assert joined(root, reversed(written), "a copy") == (own, True)
    assert joined(root, [*written, (COLUMNS, None)], "a copy") == (own, False)
    with pytest.raises(CheckFailed, match=r"a copy is not equal to what was saved.*\n +w\nhint"):
        joined(root, written[:1], "a copy")
    assert joined(replace(ROOT, certificate={"by": "me"}), written, "a copy") == ({"by": "me"}, False)
