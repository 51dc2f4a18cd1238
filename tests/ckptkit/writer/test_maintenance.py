"""A writer's maintenance of the place it saves to fails no save."""

import pytest

from ckptkit.writer.maintenance import Maintenance
from threefold.errors import StorageError
from threefold.storage import Storage


@pytest.mark.parametrize("failure", [StorageError("the server refused"), KeyError("the server refused")])
def test_the_first_writer_aborts_what_killed_writers_left(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    asked: list[str] = []

    def abort(storage: Storage) -> list[str]:
        asked.append(storage.url)
        raise failure

    monkeypatch.setattr("ckptkit.writer.maintenance.abort_uploads", abort)
    assert Maintenance("memory://run", leads=False, stripe_count=0, stripe_size_bytes=0).take_warning() == ""
    assert asked == []
    maintenance = Maintenance("memory://run", leads=True, stripe_count=0, stripe_size_bytes=0)
    assert asked == ["memory://run"]
    told, again = maintenance.take_warning(), maintenance.take_warning()
    assert "the server refused" in told
    assert again == ""
