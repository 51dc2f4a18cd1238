"""A writer's upkeep of the place it saves to fails no save."""

import pytest

from ckptkit.saving.upkeep import Upkeep
from threefold.errors import StorageError
from threefold.storage import Storage


def test_the_first_writer_aborts_what_killed_writers_left(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def abort(storage: Storage) -> list[str]:
        asked.append(storage.url)
        raise StorageError("the server refused")

    monkeypatch.setattr("ckptkit.saving.upkeep.abort_stale_uploads", abort)
    assert Upkeep("memory://run", leads=False, stripe_count=0, stripe_size_bytes=0).take_warning() == ""
    assert asked == []
    upkeep = Upkeep("memory://run", leads=True, stripe_count=0, stripe_size_bytes=0)
    assert asked == ["memory://run"]
    assert [upkeep.take_warning() for _ in range(2)] == ["the server refused", ""]
