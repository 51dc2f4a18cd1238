"""Which steps go, and that one is never half gone while it is listed."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.retention import expired, prune
from threefold.storage import open_storage
from threefold.storage.local import LocalStorage


@given(steps=st.sets(st.integers(0, 1000)), keep_last=st.integers(0, 20))
def test_the_newest_stay(steps: set[int], keep_last: int) -> None:
    gone = expired(list(steps), keep_last)
    kept = steps - set(gone)
    assert len(kept) == (min(keep_last, len(steps)) if keep_last else len(steps))
    assert not kept or not gone or max(gone) < min(kept)


def test_the_root_goes_first(tmp_path: Path) -> None:
    deleted: list[str] = []

    class Watched(LocalStorage):
        def delete(self, keys: object) -> None:
            deleted.extend(keys := list(keys))  # type: ignore[call-overload]
            super().delete(keys)

    storage = Watched(tmp_path)
    for step in (1, 2):
        for name in ("root.json", "a/part-00000.index", "a/part-00000.safetensors", "old/part-00000.safetensors"):
            storage.write(f"step-{step:09d}/{name}", b"x")
    prune(storage, [1])
    assert deleted[0] == "step-000000001/root.json"
    assert len(deleted) == 4
    assert committed_steps(storage) == [2]
    assert len(list(open_storage(tmp_path).list())) == 4
