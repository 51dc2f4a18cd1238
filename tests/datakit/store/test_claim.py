"""Claim: killed after any step, the same call makes the same output; any other content is refused and left alone."""

import os
import stat
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from datakit.files.durable import FileDigest, digest_file
from datakit.format.output import ASSEMBLY_NOTE, Output
from datakit.store.claim import claim
from tests.datakit.conftest import files_of
from threefold.errors import CheckFailed, StorageError, UserError

NAMES = ["a.bin", "a.idx", "b.bin"]


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_bytes(name.encode() * 1000)
    (folder / NAMES[-1]).write_bytes(b"")
    return folder


def claimed(output: Path, made_of: dict[str, Any] | None = None) -> AbstractContextManager[Output]:
    return claim(Output(str(output), ASSEMBLY_NOTE), {} if made_of is None else made_of)


def assemble(sources: Path, output: Path, *, copy: bool, steps: int = 99) -> None:
    with claimed(output, {"of": NAMES}) as claim_held:
        for step, name in enumerate(NAMES):
            if step == steps:
                raise Killed
            claim_held.place_file(sources / name, name, digest_file(sources / name), copy=copy)
        if steps == len(NAMES):
            raise Killed
        claim_held.commit({})


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("steps", range(len(NAMES) + 1))
def test_a_killed_assembly_is_continued(sources: Path, tmp_path: Path, copy: bool, steps: int) -> None:
    output = tmp_path / "o"
    with pytest.raises(Killed):
        assemble(sources, output, copy=copy, steps=steps)
    placed = {name: (output / name).stat().st_ino for name in NAMES[:steps]}
    assemble(sources, output, copy=copy)
    assert files_of(output) == files_of(sources)
    assert {name: (output / name).stat().st_ino for name in placed} == placed
    assert all(os.path.samefile(output / name, sources / name) != copy for name in NAMES)


def test_a_half_written_copy_is_written_again(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "o"

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Output, "adopt", kill)
        with pytest.raises(Killed):
            assemble(sources, output, copy=True)
    (output / ".work" / "shards").mkdir(exist_ok=True)
    (output / ".work" / "shards" / NAMES[0]).write_bytes(b"half")
    assemble(sources, output, copy=True)
    assert files_of(output) == files_of(sources)


def test_a_kill_before_the_note_is_forgotten(sources: Path, tmp_path: Path) -> None:
    output = tmp_path / "o"
    (output / ".work").mkdir(parents=True)
    (output / ".work" / "lock").touch()
    (output / ".work" / ".assembly.json.tmp").write_bytes(b"{")
    assemble(sources, output, copy=False)
    assert files_of(output) == files_of(sources)


def test_other_content_is_refused_and_kept(sources: Path, tmp_path: Path) -> None:
    output = tmp_path / "o"
    output.mkdir()
    (output / "mine.txt").write_text("x")
    with pytest.raises(UserError, match=r"is not empty: it holds mine\.txt"):
        assemble(sources, output, copy=False)
    (output / "mine.txt").unlink()
    (output / ".work").mkdir()
    (output / ".work" / "recipe.json").write_text("{}")  # an unfinished preprocess
    with pytest.raises(UserError, match=r"is not empty: it holds \.work/recipe\.json"):
        assemble(sources, output, copy=False)
    assert [path.name for path in output.iterdir()] == [".work"]
    with pytest.raises(UserError, match="is not a folder"):
        assemble(sources, sources / NAMES[0], copy=False)


def test_an_assembly_of_other_sources_is_refused(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        assemble(sources, tmp_path / "o", copy=False, steps=1)
    with pytest.raises(UserError, match="was begun from other sources"), claimed(tmp_path / "o"):
        pass


def test_a_claim_under_which_nothing_was_made_is_taken_over(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        assemble(sources, tmp_path / "o", copy=False, steps=0)
    with claimed(tmp_path / "o", {"of": ("others",)}) as held:
        assert held.begin({"of": ["others"]}).made_of == {"of": ["others"]}
        held.place_file(sources / NAMES[0], NAMES[0], digest_file(sources / NAMES[0]), copy=False)
    with pytest.raises(UserError, match="was begun from other sources"):
        assemble(sources, tmp_path / "o", copy=False)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        claimed(tmp_path / "o"),
        pytest.raises(StorageError, match="another run"),
        claimed(tmp_path / "o"),
    ):
        pass


def test_a_damaged_source_is_not_copied(sources: Path, tmp_path: Path) -> None:
    digest = FileDigest((sources / NAMES[0]).stat().st_size, "0" * 16)
    with (
        pytest.raises(CheckFailed, match="is damaged"),
        claimed(tmp_path / "o") as held,
    ):
        held.place_file(sources / NAMES[0], NAMES[0], digest, copy=True)
    assert not (tmp_path / "o" / NAMES[0]).exists()


def test_where_links_are_impossible_the_hint_is_to_copy(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with pytest.raises(StorageError, match="Invalid cross-device link") as caught:
        assemble(sources, tmp_path / "o", copy=False)
    assert caught.value.hint == "--copy"


def test_an_output_that_cannot_be_made(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        assemble(sources, sources / NAMES[0] / "o", copy=False)
    assert stat.S_ISREG((sources / NAMES[0]).stat().st_mode)


@pytest.mark.parametrize("fault", [UserError, CheckFailed, StorageError])
def test_sources_that_do_not_do_leave_the_output_free(sources: Path, tmp_path: Path, fault: type[UserError]) -> None:
    output = tmp_path / "o"

    def assemble_faulty() -> None:
        with claimed(output) as held:
            held.place_file(sources / NAMES[0], NAMES[0], digest_file(sources / NAMES[0]), copy=False)
            raise fault("no good")

    with pytest.raises(fault):
        assemble_faulty()
    assert output.exists() == (fault is StorageError)
    assert len(files_of(sources)) == len(NAMES)
