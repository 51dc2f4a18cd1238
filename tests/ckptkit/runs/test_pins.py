"""A pin is there or not, whatever it holds, and only on committed steps."""

import pytest

from ckptkit.runs.pins import MAX_PIN_BYTES, pin, pin_key, pin_note, unpin
from threefold.errors import UserError
from threefold.storage import Storage, open_storage


@pytest.fixture
def storage(tmp_path: object) -> Storage:
    found = open_storage(str(tmp_path))
    found.write("step-000000003/root.json", b"{}")
    return found


def test_a_pin_has_a_note(storage: Storage) -> None:
    assert pin_note(storage, 3) is None
    pin(storage, 3)
    assert pin_note(storage, 3) == ""
    pin(storage, 3, "größe\n")
    assert pin_note(storage, 3) == "größe\n"
    assert (unpin(storage, 3), unpin(storage, 3)) == (True, False)
    assert pin_note(storage, 3) is None


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff", b"[" * 50_000, b" " * (MAX_PIN_BYTES + 1)])
def test_a_damaged_pin_still_pins(storage: Storage, data: bytes) -> None:
    storage.write(pin_key(3), data)
    assert pin_note(storage, 3) == ""


def test_only_committed_steps_are_pinned(storage: Storage) -> None:
    with pytest.raises(UserError, match="holds no committed step 4"):
        pin(storage, 4)
    assert [item.key for item in storage.list()] == ["step-000000003/root.json"]
    storage.write(pin_key(4), b"")  # of a step that was set aside
    with pytest.raises(UserError, match="holds no committed step 4"):
        pin(storage, 4)
    assert pin_note(storage, 4) == ""
