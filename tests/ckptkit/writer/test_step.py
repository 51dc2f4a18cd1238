"""What a writer leaves behind where another attempt commits the step first."""

import pytest

from ckptkit.format.keys import Seat
from ckptkit.loading.roots import root_key
from ckptkit.model.layout import ParallelLayout
from tests.ckptkit.support.small_steps import half_of, save_rank, save_ranks
from threefold.storage import AlreadyExists
from threefold.storage.memory import MemoryStorage

LAYOUT = ParallelLayout(tp=2)


def lose(storage: MemoryStorage) -> None:
    """Save as the second writer of attempt a, to which attempt b commits the step before a's first writer is done."""

    def patience_s(_: float) -> float:
        if storage.info(root_key(1)) is None:
            save_ranks(storage, 1, "b", LAYOUT, 2)
        return 60.0

    with pytest.raises(AlreadyExists, match="by another attempt first"):
        save_rank(storage, Seat("", 1, "a", 1, 2), LAYOUT, 1, patience_s=patience_s)


def test_a_writer_that_lost_leaves_files_that_the_first_writer_may_still_name() -> None:
    storage = MemoryStorage()
    lose(storage)
    storage.delete([root_key(1)])  # as a prune may, before a's first writer comes to its commit
    save_rank(storage, Seat("", 1, "a", 0, 2), LAYOUT, 1)
    assert half_of(storage, 1) == ""


def test_a_first_writer_that_lost_removes_the_files_of_all() -> None:
    storage = MemoryStorage()
    lose(storage)
    root = storage.read(root_key(1))
    storage.delete([root_key(1)])

    class Late(MemoryStorage):
        """The other attempt's root comes between the first writer's looks and its commit."""

        def write(self, key: str, data: bytes, *, if_absent: bool = False, size_bytes: int | None = None) -> None:
            if if_absent:
                super().write(root_key(1), root)
            super().write(key, data, if_absent=if_absent, size_bytes=size_bytes)

    late = Late()
    for item in storage.list():
        late.write(item.key, storage.read(item.key))
    with pytest.raises(AlreadyExists, match="by another attempt first"):
        save_rank(late, Seat("", 1, "a", 0, 2), LAYOUT, 1)
    assert not [key for key in late.list_keys() if "/a/" in key]
    assert half_of(late, 1) == ""
