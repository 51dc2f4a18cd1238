"""Saves that meet one before them still running, and saves that a storage refuses for a while."""

import os
import signal

import pytest

from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.catalogue import committed_steps
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions, SaveCounts
from tests.ckptkit.support.saves import (
    NUM_LAYERS,
    ONE,
    SMALL,
    assert_holds,
    is_running,
    pieces_of,
    save_one,
    wait_until,
)
from threefold.errors import UserError
from threefold.storage import open_storage
from tools.fault_proxy import Fault, FaultProxy


def options(when_busy: str) -> CheckpointerOptions:
    return CheckpointerOptions(when_busy=when_busy, retry_s=0.0, deadline_s=30.0)


@pytest.mark.ci
@pytest.mark.slow
def test_a_save_that_meets_another_waits_for_it(s3_proxy: FaultProxy, s3_url: str) -> None:
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=0.3)
    with Checkpointer(s3_url, attempt="a", options=options("wait")) as checkpointer:
        save_one(checkpointer, 1, SMALL)
        assert checkpointer.is_busy
        save_one(checkpointer, 2, SMALL)
        assert [report.step for report in checkpointer.poll()] == [1]
        checkpointer.wait()
        assert not checkpointer.is_busy
        assert checkpointer.counts == SaveCounts(ok=2)
    assert committed_steps(open_storage(s3_url)) == [1, 2]


@pytest.mark.ci
@pytest.mark.slow
def test_a_save_that_meets_another_is_skipped(s3_proxy: FaultProxy, s3_url: str) -> None:
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=0.3)
    with Checkpointer(s3_url, attempt="a", options=options("skip")) as checkpointer:
        save_one(checkpointer, 1, SMALL)
        save_one(checkpointer, 2, SMALL)
        reports = {report.step: report for report in checkpointer.wait()}
        assert (reports[1].ok, reports[2].ok, reports[2].skipped) == (True, False, True)
        assert (reports[2].error, reports[2].url) == ("rank 0: skipped: still saving step 1", checkpointer.url)
        save_one(checkpointer, 3, SMALL, scale=3)
        checkpointer.wait()
        assert checkpointer.counts == SaveCounts(ok=2, skipped=1)
    assert committed_steps(open_storage(s3_url)) == [1, 3]
    assert_holds(s3_url, 3, SMALL, scale=3)


@pytest.mark.ci
@pytest.mark.slow
def test_nobody_waits_for_a_rank_that_skips(s3_proxy: FaultProxy, s3_url: str) -> None:
    layout = ParallelLayout(dp=2)
    first = Checkpointer(s3_url, rank=0, world_size=2, attempt="a", options=options("skip"))
    second = Checkpointer(s3_url, rank=1, world_size=2, attempt="a", options=options("skip"))
    save_one(first, 1, SMALL, layout, 0)
    save_one(second, 1, SMALL, layout, 1)
    assert all(checkpointer.wait()[0].ok for checkpointer in (first, second))
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=60.0, times=1)
    save_one(second, 2, SMALL, layout, 1)
    wait_until(lambda: s3_proxy.num_faults == 1)
    first._num_saves += 1  # this rank made no try of step 2
    save_one(second, 3, SMALL, layout, 1)
    save_one(first, 3, SMALL, layout, 0)
    (report,) = first.wait()
    assert report.error == "writer 1 failed: skipped: still saving step 2"
    assert second.is_busy
    os.kill(second.writer_pid, signal.SIGKILL)
    second.close()
    first.close()
    assert committed_steps(open_storage(s3_url)) == [1]


@pytest.mark.ci
@pytest.mark.parametrize(("delay_s", "patience_s"), [pytest.param(0.5, 30.0, marks=pytest.mark.slow), (60.0, 0.2)])
def test_an_older_save_is_given_up_for_a_newer(
    s3_proxy: FaultProxy, s3_url: str, delay_s: float, patience_s: float
) -> None:
    with Checkpointer(s3_url, attempt="a", options=options("abort")) as checkpointer:
        checkpointer._give_up_within_s = patience_s
        writer = checkpointer.writer_pid
        s3_proxy.fault = Fault("delay", method="PUT", delay_s=delay_s, times=1)
        save_one(checkpointer, 1, SMALL)
        wait_until(lambda: s3_proxy.num_faults == 1)
        save_one(checkpointer, 2, SMALL, scale=2)
        first, second = checkpointer.wait()
        assert (first.ok, first.error) == (False, "rank 0: step 1 was given up when step 2 was to be saved")
        assert second.ok
        assert is_running(writer) == (delay_s < patience_s)
        assert checkpointer.counts == SaveCounts(ok=1, failed=1)
    storage = open_storage(s3_url)
    assert committed_steps(storage) == [2]
    assert list(storage.list("step-000000001/")) == []
    assert_holds(s3_url, 2, SMALL, scale=2)


@pytest.mark.ci
@pytest.mark.slow
def test_a_writer_that_pauses_before_another_try_hears_that_it_is_given_up(
    s3_proxy: FaultProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    options = CheckpointerOptions(when_busy="abort", retry_s=60.0)
    with Checkpointer(s3_url, attempt="a", options=options) as checkpointer:
        writer = checkpointer.writer_pid
        s3_proxy.fault = Fault("503", method="PUT")
        save_one(checkpointer, 1, SMALL)
        wait_until(lambda: s3_proxy.num_faults == 5)  # the next pause is longer than a writer may take to listen
        s3_proxy.fault = Fault()
        save_one(checkpointer, 2, SMALL, scale=2)
        assert [report.ok for report in checkpointer.wait()] == [False, True]
        assert checkpointer.writer_pid == writer
    assert_holds(s3_url, 2, SMALL, scale=2)


@pytest.mark.ci
@pytest.mark.slow
def test_no_save_is_given_up_for_a_faulty_one(s3_proxy: FaultProxy, s3_url: str) -> None:
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=0.5)
    with Checkpointer(s3_url, attempt="a", options=options("abort")) as checkpointer:
        save_one(checkpointer, 1, SMALL)
        with pytest.raises(UserError, match="the metadata of a save is not JSON: Object of type set"):
            save_one(checkpointer, 2, SMALL, seen={1, 2})
        with pytest.raises(UserError, match="not in the table"):
            checkpointer.save(
                2, pieces_of(SMALL, ONE, 0), tensors=SMALL[1:], layout=ONE, num_layers=NUM_LAYERS, metadata={}
            )  # fmt: skip
        checkpointer.wait()
        assert checkpointer.counts == SaveCounts(ok=1)
    assert_holds(s3_url, 1, SMALL)


@pytest.mark.ci
@pytest.mark.slow
def test_what_another_rank_gave_up_is_not_waited_for(s3_proxy: FaultProxy, s3_url: str) -> None:
    layout = ParallelLayout(dp=2)
    checkpointers = [Checkpointer(s3_url, rank=r, world_size=2, attempt="a", options=options("abort")) for r in (0, 1)]
    checkpointers[1]._give_up_within_s = 0.2
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=60.0, times=1)
    save_one(checkpointers[1], 1, SMALL, layout, 1)
    wait_until(lambda: s3_proxy.num_faults == 1)
    save_one(checkpointers[0], 1, SMALL, layout, 0)
    save_one(checkpointers[1], 2, SMALL, layout, 1)  # its writer does not listen: it is killed, the next one tells
    report = checkpointers[0].wait()[0]
    assert report.error == "writer 1 failed: its writer was killed"
    save_one(checkpointers[0], 2, SMALL, layout, 0)
    assert checkpointers[0].wait()[0].ok
    for checkpointer in checkpointers:
        checkpointer.close()
    assert committed_steps(open_storage(s3_url)) == [2]


@pytest.mark.ci
@pytest.mark.parametrize(
    "skip", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 3))]
)  # data file, index, root (if-absent: a look first), and one more
def test_what_the_storage_refuses_for_a_while_is_tried_again(
    s3_proxy: FaultProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch, skip: int
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with Checkpointer(s3_url, attempt="a", options=CheckpointerOptions(retry_s=20.0)) as checkpointer:
        method = "PUT" if skip < 3 else None
        save_one(checkpointer, 1, SMALL)  # before the first save unfinished uploads are looked for
        assert checkpointer.wait()[0].ok
        s3_proxy.fault = Fault("503", method=method, skip=skip % 3, times=2)
        save_one(checkpointer, 2, SMALL)
        (report,) = checkpointer.wait()
    assert report.ok, report.error
    assert s3_proxy.num_faults == 2
    assert report.num_attempts > 1
    assert committed_steps(open_storage(s3_url)) == [1, 2]
    assert_holds(s3_url, 2, SMALL)


@pytest.mark.ci
@pytest.mark.slow
def test_what_it_refuses_for_longer_fails(s3_proxy: FaultProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with Checkpointer(s3_url, attempt="a", options=CheckpointerOptions(retry_s=1.0)) as checkpointer:
        s3_proxy.fault = Fault("503", method="PUT")
        save_one(checkpointer, 1, SMALL)
        (report,) = checkpointer.wait()
        assert "503" in report.error
        assert report.num_attempts > 1
        s3_proxy.fault = Fault()
    assert committed_steps(open_storage(s3_url)) == []


@pytest.mark.parametrize("lost", [0, 1])
def test_files_that_may_have_been_committed_are_not_removed(
    s3_proxy: FaultProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    made = Checkpointer(s3_url, rank=1, world_size=2, attempt="a", options=CheckpointerOptions(retry_s=0.0))
    with made as second:
        s3_proxy.fault = Fault("reset", method="PUT", skip=lost, times=1)  # the answer to the data file or to the index
        save_one(second, 1, SMALL, ParallelLayout(dp=2), 1)
        assert not second.wait()[0].ok
    found = {item.key.rpartition("part-00001.")[2] for item in open_storage(s3_url).list()}
    assert found == ({"failed", "index", "safetensors"} if lost else {"failed"})
