"""A run is watched by its file alone, wherever that is: each line once, to the end, in any size of terminal."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptkit.model.layout import ParallelLayout
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.trainer.support.training import ROOT, call
from threefold.errors import StorageError
from threefold.storage import open_storage
from trainer.observe.watch.screen import drawn
from trainer.observe.watch.tail import Tail
from trainer.observe.watch.view import View, curve, line_text


def step(number: int, **others: Any) -> dict[str, Any]:
    line = {"step": number, "loss": 4 - number / 100, "train_steps": 100, "step_s": 0.5, "tokens_per_s": 2000.0}
    return {**line, "grad_norm": 1.0, "lr": 1e-3, "memory_gib": 2.5, "mfu": 0.4, **others}


END = {"event": "end", "step": 100, "complete": True}


def write(path: Path, lines: Sequence[dict[str, Any]], *, mode: str = "w") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_tail_has_each_new_line_once(scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, [step(1), step(2)])
    tail = Tail(f"{scheme}{path}")
    assert [line["step"] for line in tail.read()] == [1, 2]
    assert tail.read() == []
    write(path, [step(3)], mode="a")
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in tail.read()] == [3]
    with path.open("a") as file:
        file.write('ss": 1.5}\nnot a line\n[5]\n')
    assert tail.read() == [{"step": 4, "loss": 1.5}]
    write(path, [step(1)])  # a resume cut it back
    assert [line["step"] for line in tail.read()] == [1]


def test_of_a_long_file_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, [step(number) for number in range(1, 5001)])
    lines = Tail(str(path), first_bytes=10_000).read()
    assert lines[-1]["step"] == 5000
    assert 40 < len(lines) < 100


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no metrics file"):
        Tail(str(tmp_path / "m.jsonl"))


def test_steps_that_come_again_replace_theirs() -> None:
    view = View()
    view.take([step(1), step(2), step(3), {"event": "end", "step": 3}])
    assert view.is_over
    view.take([{"event": "resume", "step": 1}, step(2, loss=9.0)])
    assert list(view.losses) == [(1, 3.99), (2, 9.0)]
    assert not view.is_over
    assert view.left_s == 49.0


def test_a_curve_has_a_dot_for_each_point_of_its_corners() -> None:
    assert curve([(1, 2.0), (3, 1.0)], 3, 2, is_plain=True) == [".  ", "  ."]
    assert curve([(1, 2.0), (3, 1.0)], 1, 1) == ["⢁"]
    assert curve([(5, 2.0), (5, 2.0)], 2, 1, is_plain=True) == [". "]


@pytest.mark.parametrize("width", [1, 12, 30, 100, 300])
@pytest.mark.parametrize("height", [1, 5, 12, 60])
@pytest.mark.parametrize("is_plain", [False, True])
def test_a_screen_never_has_more_than_fits(width: int, height: int, is_plain: bool) -> None:
    view = View()
    rows = drawn(view, "m.jsonl", width=width, height=height, silent_s=0.0, is_plain=is_plain)
    view.take([*(step(number) for number in range(1, 60)), {"event": "save", "step": 50, "ok": True}])
    rows += drawn(view, "m.jsonl", width=width, height=height, silent_s=99.0, is_plain=is_plain)
    assert len(rows) <= 2 * height
    assert all(len(row) <= width for row in rows)
    if is_plain:
        assert all(row.isascii() for row in rows)
    if (width, height) == (100, 60):
        text = "\n".join(rows)
        assert "step 59/100  no line for 0:01:39" in text
        assert "loss 3.4100" in text
        assert "left 0:00:20" in text
        assert "saved step 50" in text


def test_a_line_is_read_by_people() -> None:
    expected = "step 7/100  loss 3.9300  left 0:00:46  rate 2,000 tok/s  mfu 40.0%  gradient 1.000  memory 2.50 GiB"
    assert line_text(step(7)) == expected
    save = {"event": "save", "step": 4, "ok": False, "error": "no room", "write_s": 0.12345, "counts": {"ok": 1}}
    assert line_text(save) == "step 4: save, ok no, error no room, write_s 0.1235"


def test_without_a_terminal_it_prints_lines_up_to_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "m.jsonl", [step(99), step(100), END])
    assert call("watch", tmp_path / "m.jsonl") == 0
    assert capsys.readouterr().out.splitlines() == [line_text(step(100)), "step 100: end, complete yes"]
    assert call("watch", tmp_path / "m.jsonl", "--json") == 0
    known = json.loads(capsys.readouterr().out)
    assert known["last"] == step(100)
    assert known["is_over"] is True


def test_a_run_names_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "m.jsonl", [step(100), END])
    tensors, storage = gpt_tensors(1), open_storage(tmp_path / "run")
    for number, log in enumerate(({}, {"metrics": f"{tmp_path}/m.jsonl"}), 1):
        config = {"config": {"log": log}}
        write_checkpoint(storage, number, ParallelLayout(), 1, tensors, values(tensors), metadata=config)
    assert call("watch", tmp_path / "run") == 0
    assert call("watch", tmp_path / "run" / "step-000000001") == 2
    texts = capsys.readouterr()
    assert "step 100: end" in texts.out
    assert "names no metrics file" in texts.err
    assert call("watch", tmp_path / "nothing") == 3


def test_on_a_terminal_it_is_drawn_and_ends_with_the_run(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", [*(step(number) for number in range(1, 101)), END])
    reader, terminal = pty.openpty()
    command = [sys.executable, "-m", "trainer", "watch", tmp_path / "m.jsonl"]
    environment = os.environ | {"COLUMNS": "80", "LINES": "24", "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(command, stdout=terminal, cwd=ROOT, env=environment) as process:
        os.close(terminal)
        shown = b""
        while True:
            try:
                data = os.read(reader, 1 << 16)
            except OSError:  # its other end is closed
                break
            shown += data
        os.close(reader)
    text = shown.decode()
    assert process.returncode == 0
    assert "step 100/100  over" in text
    assert any("⠀" < letter <= "⣿" for letter in text)
