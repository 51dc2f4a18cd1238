"""What the version before wrote is read for ever: a store, an archive and checkpoints of two layouts in tests/golden/.

`tests/golden/make.py` made each folder once, with that version's code; expected.json records what its files hold.
"""

import filecmp
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
import datakit
from ckptkit import Box, Piece
from ckptkit.cli import main as ckptkit_main
from ckptkit.foreign.dcp.export import export_dcp
from ckptkit.foreign.folder import FolderSource
from ckptkit.foreign.hf.folder import HfFolder
from ckptkit.foreign.kinds import folder_of
from ckptkit.mapping.mapper import Mapper
from ckptkit.mapping.source import MappedSource
from tests.golden import make
from tests.trainer.support.training import Job, curve
from threefold.storage import open_storage
from trainer.cli import main as trainer_main

GOLDEN = sorted(path.parent for path in (Path(__file__).parent / "golden").glob("*/expected.json"))
STORES = [folder for folder in GOLDEN if (folder / "store").exists()]
TRAININGS = [folder for folder in GOLDEN if (folder / "job.toml").exists()]
RUNS = [folder for folder in GOLDEN if (folder / "run").exists() and folder not in TRAININGS]
STEPS = [(folder, step) for folder in RUNS for step in make.layouts(folder.name)]


def test_all_that_was_ever_written_is_small() -> None:
    assert {*STORES, *RUNS, *TRAININGS} == set(GOLDEN)
    assert sum(path.stat().st_size for folder in GOLDEN for path in folder.rglob("*") if path.is_file()) < 1_000_000


def expected(folder: Path, what: str) -> Any:
    return json.loads((folder / "expected.json").read_text())[what]


def ckptkit_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert ckptkit_main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_the_files_of_a_version_are_all_there_and_as_they_were(folder: Path) -> None:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "expected.json"]
    assert {str(path.relative_to(folder)): make.sha256(path) for path in paths} == expected(folder, "files")


@pytest.mark.parametrize("folder", STORES, ids=lambda folder: folder.name)
class TestOfAStore:
    def test_its_store_is_sound_and_read_as_then(self, folder: Path) -> None:
        assert datakit.verify(folder / "store") == []
        assert make.store_digests(folder / "store") == expected(folder, "store")

    def test_its_archive_is_sound_and_becomes_the_store(self, folder: Path, tmp_path: Path) -> None:
        assert datakit.verify(folder / "archive") == []
        datakit.unarchive(str(folder / "archive"), tmp_path / "store")
        names = sorted(path.name for path in (tmp_path / "store").iterdir())
        assert names == sorted(path.name for path in (folder / "store").iterdir() if not path.name.startswith("."))
        assert filecmp.cmpfiles(tmp_path / "store", folder / "store", names, shallow=False) == (names, [], [])

    def test_its_store_and_a_store_of_the_same_documents_differ_in_nothing(self, folder: Path, tmp_path: Path) -> None:
        datakit.merge([folder / "store"], tmp_path / "merged")
        assert make.store_digests(tmp_path / "merged") == expected(folder, "store")


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
class TestOfARun:
    def test_its_checkpoint_becomes_the_files_of_then_on_other_ranks(self, folder: Path, tmp_path: Path) -> None:
        words = make.other_ranks(folder.name)
        assert ckptkit_main(["reshard", f"{folder}/run/step-000000100", str(tmp_path), *words]) == 0
        made = {path.name: make.sha256(path) for path in tmp_path.rglob("*.safetensors")}
        assert made == expected(folder, "resharded")

    def test_its_run_goes_on(self, folder: Path, tmp_path: Path) -> None:
        """A run that the version before began takes steps of this one and prunes its own."""
        shutil.copytree(folder / "run", tmp_path / "run")
        make.save_all_ranks(folder.name, f"{tmp_path}/run", 300, ckptkit.ParallelLayout(tp=2))
        assert ckptkit_main(["prune", f"{tmp_path}/run", "--keep-last", "2"]) == 0
        assert [path.name for path in sorted((tmp_path / "run").iterdir())] == ["step-000000200", "step-000000300"]


@pytest.mark.parametrize(("folder", "step"), STEPS, ids=lambda value: getattr(value, "name", value))
class TestOfACheckpoint:
    def test_it_is_listed_and_sound(self, folder: Path, step: int, capsys: pytest.CaptureFixture[str]) -> None:
        assert step in [each["step"] for each in ckptkit_json(capsys, "ls", f"{folder}/run")]
        assert ckptkit_json(capsys, "verify", f"{folder}/run/step-{step:09}")["faults"] == []

    def test_it_hashes_as_then(self, folder: Path, step: int, capsys: pytest.CaptureFixture[str]) -> None:
        found = ckptkit_json(capsys, "hash", f"{folder}/run/step-{step:09}")
        recorded = expected(folder, "checkpoints")[str(step)]
        assert {name: found[name] for name in recorded} == recorded

    def test_it_hashes_as_then_through_a_mapping_and_as_another_programs_folder(
        self, folder: Path, step: int, tmp_path: Path
    ) -> None:
        (tmp_path / "rules.toml").write_text("")
        recorded = expected(folder, "checkpoints")[str(step)]
        with ckptkit.CheckpointReader(open_storage(folder / "run"), step) as reader:
            mapped = ckptkit.hash_checkpoint(MappedSource(reader, Mapper(str(tmp_path / "rules.toml"), reader)))
            assert {name: getattr(mapped, name) for name in recorded} == recorded
            export_dcp(reader, open_storage(tmp_path / "dcp"))
        with folder_of("dcp", f"dcp:{tmp_path}/dcp").open(0) as source:  # which knows no ties
            assert recorded["tensors"].items() <= ckptkit.hash_checkpoint(source).tensors.items()

    def test_it_is_restored_whole_with_its_metadata(self, folder: Path, step: int) -> None:
        tensors = make.table(folder.name)
        expected = {info.name: make.values(info, step) for info in tensors if info.placement.tied_to is None}
        pieces = [
            Piece(name, Box((0,) * value.ndim, value.shape), 0, value.size, np.zeros_like(value).reshape(-1))
            for name, value in expected.items()
        ]
        root = ckptkit.restore(f"{folder}/run", step, pieces, tensors=tensors)
        for piece in pieces:
            assert piece.data.tobytes() == expected[piece.name].tobytes(), piece.name
        assert root.metadata == {"step": step, "val_loss": 1000 / step, "seed": "0x5eed"}
        assert str(root.layout) == make.layouts(folder.name)[step]
        assert list(root.tensors.values()) == tensors, "placements too, whatever version of the root they are from"

    def test_a_copy_is_the_same_and_a_reshard_is_of_version_2_with_the_same_hash(
        self, folder: Path, step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source, root = f"{folder}/run/step-{step:09}", f"step-{step:09}/root.json"
        assert ckptkit_main(["copy", source, f"{tmp_path}/copy"]) == 0
        assert (tmp_path / "copy" / root).read_bytes() == (folder / "run" / root).read_bytes()
        assert ckptkit_main(["reshard", source, f"{tmp_path}/other", "--tp", "2", "--pp", "3"]) == 0
        capsys.readouterr()
        found = ckptkit_json(capsys, "hash", f"{tmp_path}/other")
        assert found["all"] == expected(folder, "checkpoints")[str(step)]["all"]
        assert json.loads((tmp_path / "other" / root).read_text())["version"] == 2
        about = [ckptkit_json(capsys, "inspect", url)["tensors"] for url in (source, f"{tmp_path}/other")]
        assert about[0] == about[1]


@pytest.mark.parametrize("model", ["gpt2", "llama", "llama-linear", "mistral", "qwen2", "qwen3"])
def test_a_model_folder_hashes_as_the_run_that_it_becomes(model: str, tmp_path: Path) -> None:
    url = f"hf:{Path(__file__).parent}/golden/hugging-face/{model}"
    assert ckptkit_main(["import", url, str(tmp_path)]) == 0
    with HfFolder(url).open(0) as folder, ckptkit.Run(str(tmp_path)).open(0) as imported:
        assert isinstance(folder, FolderSource)
        assert ckptkit.hash_checkpoint(folder) == ckptkit.hash_checkpoint(imported)


@pytest.mark.parametrize("folder", TRAININGS, ids=lambda folder: folder.name)
class TestOfATraining:
    def test_one_process_goes_on_with_the_losses_of_then(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.copied(folder, tmp_path, monkeypatch)
        assert trainer_main(["train", "job.toml", "--save", "run", "--train-steps", "8", "--metrics", "metrics"]) == 0
        assert curve(tmp_path / "metrics") == pytest.approx(self.losses(folder, 5), rel=1e-10)
        assert ckptkit_main(["verify", "run/step-000000004"]) == 0
        assert ckptkit_main(["verify", "run/step-000000008"]) == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("layout", [("--tp", 2, "--pp", 2), ("--tp", 4), ("--pp", 2)], ids=str)
    def test_other_ranks_go_on_with_them(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: tuple[object, ...]
    ) -> None:
        self.copied(folder, tmp_path, monkeypatch)
        flags = ["--save", tmp_path / "run", "--data.stores", tmp_path / "tokens", "--train-steps", 8]
        Job(4, tmp_path / "job.toml", *layout, *flags, metrics=tmp_path / "metrics").run()
        assert curve(tmp_path / "metrics") == pytest.approx(self.losses(folder, 5), rel=1e-10)

    def test_a_run_from_the_start_has_them_all(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.copied(folder, tmp_path, monkeypatch)
        assert trainer_main(["train", "job.toml", "--train-steps", "8", "--metrics", "metrics"]) == 0
        assert curve(tmp_path / "metrics") == pytest.approx(self.losses(folder, 1), rel=1e-10)

    def copied(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        monkeypatch.chdir(tmp_path)

    def losses(self, folder: Path, first: int) -> dict[int, float]:
        return {int(step): loss for step, loss in expected(folder, "losses").items() if int(step) >= first}
