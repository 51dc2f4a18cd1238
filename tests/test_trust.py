"""What files and places of others can do, as docs/concepts/trust.md says: promises that no other test tries."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ckptkit import Retention, prune
from ckptkit.cli import main
from ckptkit.runs.catalogue import committed_steps
from datakit import Recipe, TokenStore, preprocess, train_tokenizer
from tests.ckptkit.support.hf_folders import write_folder
from tests.ckptkit.support.saves import SMALL, save_whole
from threefold.storage import ObjectInfo, Storage, open_storage
from threefold.storage.wrapping import WrappingStorage

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    "../other/root.json",
    "/etc/passwd",
    "step-000000001/../../other",
    "step-000000001/a/../../../x",
    "step-000000002/a/part-00000.safetensors/../../../../x",
    "step-000000003//root.json",
    "\0",
    "step-000000001/a/part-00000.index\n",
)


class HostileListing(WrappingStorage):
    """A storage that is not a disk, whose listings show keys that lead out of it; what is deleted is noted."""

    hides_files = True

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.deleted: list[str] = []

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        keys = (key for key in OUTSIDE if key.startswith(prefix))
        return iter([*super().list(prefix), *(ObjectInfo(key, 5, 1.0) for key in keys)])

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        return (item.key for item in self.list(prefix))

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        return iter([*super().list_folders(prefix), "..", "step-000000009"])

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self.deleted += keys
        super().delete(keys)


def test_a_listing_has_nothing_deleted_outside_of_a_run(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        assert save_whole(tmp_path / "run", step, SMALL).ok
    storage = HostileListing(open_storage(tmp_path / "run"))
    assert committed_steps(storage) == [1, 2, 3]
    prune(storage, Retention(keep_last=1), orphans_older_than_s=0)
    assert committed_steps(storage) == [3]
    assert storage.deleted
    assert all(re.fullmatch(r"step-00000000[12]/(root\.json|[\w-]+/part-\d{5}\.\w+)", key) for key in storage.deleted)


def test_code_in_a_model_s_folder_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "model", "llama", auto_map={"AutoModelForCausalLM": "modeling_x.Model"})
    for name in ("modeling_x", "configuration_x", "setup", "conftest", "__init__"):
        (tmp_path / "model" / f"{name}.py").write_text(f"open({str(tmp_path / 'made')!r}, 'w').close()\n")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch made'\ntR.")
    assert main(["import", str(tmp_path / "model"), str(tmp_path / "run"), "--from", "hf"]) == 0, capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again"), "--to", "hf"]) == 0
    assert not (tmp_path / "made").exists()
    assert not list((tmp_path / "again").glob("*.py"))


def test_the_origin_of_a_document_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n' * 40)
    train_tokenizer([str(tmp_path / "a.jsonl")], str(tmp_path / "tok.json"), vocab_size=300)
    preprocess(
        [str(tmp_path / "a.jsonl")], str(tmp_path / "store"), Recipe(str(tmp_path / "tok.json"), append_eod=True)
    )
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "a.jsonl").mkdir()  # whoever opened it would fail
    store = TokenStore.open(tmp_path / "store")
    assert store.origin(3).path == str(tmp_path / "a.jsonl")
    assert len(store.document(3)) > 0


def test_every_claim_of_the_page_names_a_test() -> None:
    rows = (ROOT / "docs" / "concepts" / "trust.md").read_text().partition("## How it is tried")[2].splitlines()
    claims = [row for row in rows if row.startswith("| ") and not row.startswith("| promise")]
    assert len(claims) >= 15
    assert all(re.search(r"\| `tests/[\w/]+\.py: test_\w+` \|$", row) for row in claims)
