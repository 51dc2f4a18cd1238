"""What ends ranks is one sentence with rank, host, how it ended and what to try; what they said is not said again."""

import json
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from threefold.errors import StorageError
from trainer.job.failure import record
from trainer.job.launch_faults import FailedLaunch, report_ranks
from trainer.job.whereabouts import RankLost

HOST = socket.gethostname()
Failed = Callable[..., ChildFailedError]


@pytest.fixture
def failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Failed:
    """Make torch's error out of an exit code of each rank, with the error that the rank left, if any."""

    def make(*ends: tuple[int, Exception | None]) -> ChildFailedError:
        failures = {}
        for rank, (code, error) in enumerate(ends):
            path = tmp_path / f"{rank}.json"
            if error is not None:
                monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
                record(error)
            failures[rank] = ProcessFailure(rank, 100 + rank, code, str(path))
        return ChildFailedError("python", failures)

    return make


def fault(error: ChildFailedError) -> FailedLaunch:
    with pytest.raises(FailedLaunch) as raised:
        report_ranks(error)
    return raised.value


LOST = RankLost("on rank 0 of 3: another rank is gone: Connection reset by peer", hint="the same command resumes")


def test_a_rank_that_was_killed_is_the_first_of_those_that_ended(
    failed: Failed, capsys: pytest.CaptureFixture[str]
) -> None:
    found = fault(failed((3, LOST), (-signal.SIGTERM, None), (-signal.SIGKILL, None)))
    assert found.message == f"rank 2 on {HOST} (local rank 2, pid 102) was ended by SIGKILL"
    assert "dmesg" in str(found.hint)
    assert found.exit_code == 137
    assert not capsys.readouterr().err  # the first said itself what it lost, the second was ended by the launcher


def test_a_rank_that_raised_is_named_with_its_error(failed: Failed, capsys: pytest.CaptureFixture[str]) -> None:
    found = fault(failed((1, RuntimeError("boom\nand more")), (7, None)))
    assert found.message == f"rank 0 on {HOST} (local rank 0, pid 100) ended with 1: RuntimeError: boom"
    assert found.exit_code == 1
    assert capsys.readouterr().err == f"also rank 1 on {HOST} (local rank 1, pid 101) ended with 7\n"


@pytest.mark.parametrize("others", [(), ((-signal.SIGTERM, None),), ((3, LOST),)])
def test_what_a_rank_has_said_is_not_said_again(
    failed: Failed, capsys: pytest.CaptureFixture[str], others: tuple[Any, ...]
) -> None:
    assert report_ranks(failed((3, StorageError("no space", hint="df -h")), *others)) == 3
    assert not capsys.readouterr().err


def test_a_rank_that_was_lost_is_found_with_a_time_before_others(failed: Failed) -> None:
    error = failed((1, RuntimeError("late")), (1, RuntimeError("early")))
    path = Path(error.failures[1].error_file)
    left = json.loads(path.read_text())
    left["message"]["extraInfo"]["timestamp"] = str(int(time.time()) - 60)
    path.write_text(json.dumps(left))
    early = ProcessFailure(1, 101, 1, str(path))
    assert fault(ChildFailedError("python", {**error.failures, 1: early})).message.endswith("early")
