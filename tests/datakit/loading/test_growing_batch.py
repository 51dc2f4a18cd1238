"""Loader of a batch that grows: the steps of one stream, resumed on other ranks, and rows of several lengths."""

import pickle

import numpy as np
import pytest

from datakit import BatchSizes, Blend, Loader, Segment, TokenStore, write_store
from threefold.errors import UserError

L = 8


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    tokens = np.random.default_rng(0).integers(0, 99, 700)
    return write_store(tmp_path_factory.mktemp("stores") / "700", np.array_split(tokens, 7), vocab_size=99)


@pytest.fixture(scope="module")
def blend(store: TokenStore) -> Blend:
    return Blend([(store, 1)], seq_length=L, seed=5)


GROWING = BatchSizes(12, (4, 4, 30))  # steps of 4, 4, 4, 4, 8, 8, 12 samples


@pytest.mark.parametrize("num_steps", [2, 4, 6])  # inside the steps of one size, and at both their ends
def test_a_batch_that_grows_is_read_and_resumed_as_one_stream(blend: Blend, num_steps: int) -> None:
    sizes = [4, 4, 4, 4, 8, 8, 12, 12]
    with Loader(blend, 2, GROWING, 1, 2) as whole, pickle.loads(pickle.dumps(whole)) as other:
        steps = [whole.next_step() for _ in sizes]
        assert [step.shape for step in steps] == [(size // 4, 2, L) for size in sizes]
        begins = [sum(sizes[:number]) for number in range(len(sizes))]
        assert [step.first_sample for step in steps] == begins
        for first, step in zip(begins, steps):
            assert (step.tokens.reshape(-1, L) == blend.batch(whole.samples(first).ravel()).tokens).all()
        for _ in range(num_steps):
            other.next_step()
        state = other.state_dict()
    with Loader(blend, 4, GROWING) as resumed:  # on one rank
        resumed.load_state_dict(state)
        for first, size, step in zip(begins[num_steps:], sizes[num_steps:], steps[num_steps:]):
            assert resumed.global_batch_size == size
            rows = resumed.next_step().tokens.reshape(-1, 2, 2, L)[:, 1]  # those of rank 1 of 2
            assert (rows == step.tokens).all(), first


def test_a_batch_grows_by_whole_micro_batches(blend: Blend) -> None:
    with pytest.raises(UserError, match="a step of 4 samples is not a number of micro-batches of 8"):
        Loader(blend, 4, GROWING, 0, 2)


def test_rows_change_their_length_where_a_step_of_a_growing_batch_begins(store: TokenStore) -> None:
    def read(begin: int) -> list[tuple[int, int, int]]:
        longer = Blend([(store, 1)], seq_length=L, seed=5, later=[Segment(begin, seq_length=2 * L)])
        with Loader(longer, 2, GROWING) as loader:
            return [loader.next_step().shape for _ in range(6)]

    assert read(24) == [(2, 2, L)] * 4 + [(4, 2, L), (4, 2, 2 * L)]
    with pytest.raises(UserError, match=r"from sample 20 on, in the middle of the step of samples 16 to 23") as caught:
        read(20)
    assert caught.value.hint.startswith("from_sample = 24;")
