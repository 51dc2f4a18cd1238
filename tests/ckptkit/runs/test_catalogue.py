"""Only committed steps are listed, and addresses mean what the design says."""

import pytest

from ckptkit.loading.roots import latest_step
from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.run import resolve
from threefold.errors import StorageError, UserError
from threefold.storage import open_storage


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
