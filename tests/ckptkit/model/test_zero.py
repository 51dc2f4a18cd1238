"""The dp intervals of a bucket must cover every element of every tensor exactly once, for any dp size."""

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.model.zero import ALIGNMENT_BYTES, bucket_offsets, overlaps, padded_size, shard_interval

numels = st.lists(st.integers(0, 300), max_size=30)
itemsizes = st.sampled_from([1, 2, 4, 8])


@given(numels, itemsizes)
def test_tensors_are_aligned_in_order_and_disjoint(numels: list[int], itemsize: int) -> None:
    offsets, total = bucket_offsets(numels, itemsize)
    end = 0
    for offset, numel in zip(offsets, numels, strict=True):
        assert offset * itemsize % ALIGNMENT_BYTES == 0
        assert end <= offset < end + ALIGNMENT_BYTES // itemsize
        end = offset + numel
    assert total == end


@given(numels, itemsizes, st.integers(1, 9))
def test_intervals_cover_each_element_once(numels: list[int], itemsize: int, dp_size: int) -> None:
    offsets, total = bucket_offsets(numels, itemsize)
    covered = {(index, position): 0 for index, numel in enumerate(numels) for position in range(numel)}
    end = 0
    for dp_rank in range(dp_size):
        start, stop = shard_interval(total, dp_size, dp_rank, itemsize)
        assert start == end
        assert start * itemsize % ALIGNMENT_BYTES == 0
        end = stop
        for index, a, b in overlaps(offsets, numels, start, stop).tolist():
            assert a < b
            for position in range(a, b):
                covered[index, position] += 1
                assert start <= offsets[index] + position < stop
    assert end == padded_size(total, dp_size, itemsize) >= total
    assert set(covered.values()) <= {1}


def test_padding_is_less_than_one_aligned_step_a_rank() -> None:
    offsets, total = bucket_offsets([100, 3], itemsize=4)
    assert offsets == [0, 112]
    assert total == 115
    assert padded_size(total, dp_size=4, itemsize=4) == 128
    assert [shard_interval(total, 4, rank, 4) for rank in range(4)] == [(0, 32), (32, 64), (64, 96), (96, 128)]
    assert overlaps(offsets, [100, 3], 96, 128).tolist() == [[0, 96, 100], [1, 0, 3]]
