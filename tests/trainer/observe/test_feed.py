"""Whatever a sink does, its lines are taken without a wait, what it loses is counted, and the end has a bound."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.trainer.support.planted_sink import __name__ as PLANTED
from trainer.observe.feed import Feed, Loss, close_all
from trainer.observe.sinks.sink import Opening

ROOT = Path(__file__).parents[3]


def feed(name: str, path: Path, texts: list[str], **options: int) -> Feed:
    return Feed(name, Opening("run", 0), {"path": str(path)}, texts.append, module=PLANTED, **options)  # type: ignore[arg-type]


def written(path: Path) -> list[str]:
    return path.read_text().split()


def test_lines_come_in_order_and_all_of_them(tmp_path: Path) -> None:
    texts: list[str] = []
    sink = feed("sound", tmp_path / "out", texts)
    for step in range(1, 301):
        sink.write({"step": step})
    assert close_all([sink], 60.0) == [Loss("sound", 300, 0)]
    assert written(tmp_path / "out") == [*map(str, range(1, 301)), "closed"]
    assert texts == []


def test_a_sink_that_hangs_loses_lines_and_holds_nothing_up(tmp_path: Path) -> None:
    texts: list[str] = []
    sink, sound = feed("hangs", tmp_path / "a", texts, most_bytes=100_000), feed("sound", tmp_path / "b", texts)
    for step in range(1, 20_001):  # more than its pipe and what waits can hold
        for taker in (sink, sound):
            taker.write({"step": step})
    assert sound._process.poll() is None
    [kept], [lost] = close_all([sound], 60.0), close_all([sink], 0.2)
    assert lost.lines == 20_000
    assert 19_000 < lost.lost <= 20_000
    assert kept == Loss("sound", 20_000, 0)
    assert sink._process.poll() == -signal.SIGKILL
    [full] = [text for text in texts if "takes no lines" in text]
    assert full.startswith("warning: hangs takes no lines: from step ")


def test_a_sink_that_never_ends_is_ended(tmp_path: Path) -> None:
    sink = feed("never ends", tmp_path / "out", [])
    sink.write({"step": 1})
    while not (tmp_path / "out").exists() or not written(tmp_path / "out"):
        time.sleep(0.02)
    assert close_all([sink], 0.1) == [Loss("never ends", 1, 0)]
    assert sink._process.poll() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("fault", "lost", "says"),
    [
        ("raises", 1, "loses lines: planted"),
        ("dies", 4, "ended with 7"),
        ("refuses", 6, "takes no lines: planted: it cannot be opened"),
    ],
)
def test_what_fails_is_said_once_and_counted(fault: str, lost: int, says: str, tmp_path: Path) -> None:
    texts: list[str] = []
    sink = feed(fault, tmp_path / "out", texts)
    for step in range(1, 7):
        sink.write({"step": step})
    [loss] = close_all([sink], 60.0)
    assert (loss.sink, loss.lines) == (fault, 6)
    assert loss.lost >= lost  # of one that dies: all that it was reading
    assert [text for text in texts if says in text] == texts
    assert len(texts) == 1
    if fault == "raises":
        assert written(tmp_path / "out") == ["1", "2", "4", "5", "6", "closed"]


def test_a_trainer_that_is_killed_leaves_lines_and_no_process(tmp_path: Path) -> None:
    """And one that a signal to its group ends: the sink is of a session of its own."""
    program = f"""
    import os, sys, time
    sys.path.insert(0, {str(ROOT)!r})
    from trainer.observe.feed import Feed
    from trainer.observe.sinks.sink import Opening
    sink = Feed("sound", Opening("run", 0), {{"path": sys.argv[1]}}, print, module={PLANTED!r})
    for step in range(5):
        sink.write({{"step": step}})
    while sink._waiting:
        time.sleep(0.01)
    print(sink._process.pid, flush=True)
    time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.killpg(process.pid, signal.SIGKILL)
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.02)
    assert written(tmp_path / "out") == ["0", "1", "2", "3", "4", "closed"]
