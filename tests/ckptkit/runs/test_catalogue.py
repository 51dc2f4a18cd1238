"""Only committed steps are listed, and addresses mean what the design says."""

import pytest

from ckptkit.loading.roots import latest_step
from ckptkit.runs.catalogue import MAX_PIN_BYTES, committed_steps, pin, pin_key, pin_note, unpin
from ckptkit.runs.run import resolve
from threefold.errors import StorageError, UserError
from threefold.storage import Storage, open_storage


def test_only_folders_with_a_root_are_committed_steps(url: str) -> None:
    storage = open_storage(url)
    assert committed_steps(storage) == []
    assert latest_step(storage) is None
    for key in (
        "step-000000020/root.json", "step-000000003/root.json", "step-1234567890/root.json",
        "step-000000030/a/part-00000.safetensors", "step-000000030/a/root.json", "step-000000040/root.json.new",
        "step-7/root.json", "step-0000000008/root.json", "other/root.json", "root.json", "step-000000050",
    ):  # fmt: skip
        storage.write(key, b"{}")
    assert committed_steps(storage) == [3, 20, 1234567890]
    assert latest_step(storage) == 1234567890


def test_addresses(url: str) -> None:
    storage = open_storage(url)
    with pytest.raises(StorageError, match=r"does not exist|nothing is stored at") as caught:
        resolve(url)
    assert caught.value.hint is not None
    storage.write("notes.txt", b"mine")
    with pytest.raises(UserError, match="holds no committed step") as caught:
        resolve(url)
    storage.write("step-000000003/root.json", b"{}")
    storage.write("step-000000020/root.json", b"{}")
    assert (resolve(url)[0].url, resolve(url)[1]) == (storage.url, 20)
    assert (resolve(f"{url}/step-000000003")[0].url, resolve(f"{url}/step-000000003/")[1]) == (storage.url, 3)
    with pytest.raises(UserError, match="holds no committed step 4"):
        resolve(f"{url}/step-000000004")


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
