"""Steps copied to slower tiers by real writer processes, through slow and dead servers, kills and damage."""

import json
import os
import queue
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptkit.check.hash import hash_checkpoint
from ckptkit.check.verify import verify_checkpoint
from ckptkit.format.keys import Seat, step_folder
from ckptkit.handoff.protocol import SaveOutcome, TierCopy
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.restore import restore
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Piece
from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.retention import Retention
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from ckptkit.tiers.tier import Tier
from ckptkit.writer import copier
from ckptkit.writer.copier import TierCopier, copy_to_tier
from tests.ckptkit.support.model_tables import values
from tests.ckptkit.support.saves import (
    SMALL,
    assert_holds,
    assert_restored,
    is_running,
    pieces_of,
    save_one,
    save_whole,
    start_rank,
    wait_until,
)  # fmt: skip
from threefold.errors import CheckFailed, UserError
from threefold.storage import AlreadyExists, open_storage
from tools.fault_proxy import Fault, FaultProxy


@pytest.fixture(params=["local", "s3"])
def slow(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "slow") if request.param == "local" else request.getfixturevalue("s3_url")


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage clients give up within seconds."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "2")


def contents(url: str | Path, step: int | None = None) -> dict[str, bytes]:
    """Every object of a run, or of one step."""
    storage = open_storage(url)
    return {item.key: storage.read(item.key) for item in storage.list("" if step is None else step_folder(step))}


def saver(fast: str | Path, *tiers: Tier, keep_last: int = 0) -> Checkpointer:
    options = CheckpointerOptions(deadline_s=20.0, tiers=tiers, retention=Retention(keep_last=keep_last))
    return Checkpointer(str(fast), attempt="a", options=options)


def copies(reports: list, url: str) -> dict[int, str]:
    """How the copies to a tier ended: an error, or nothing, for each step."""
    return {report.step: report.error for report in reports if report.url == url}


def tier_copy_of(fast: str | Path, slow: str | Path, step: int = 1, attempt: str = "a-0001") -> TierCopy:
    seats = (Seat(str(url), step, attempt) for url in (fast, slow))
    return TierCopy(*seats, False, 1, 0, 20.0, Retention())


def test_due_steps_are_copied_byte_for_byte(tmp_path: Path, slow: str) -> None:
    fast = tmp_path / "fast"
    with saver(fast, Tier(slow, every=20)) as checkpointer:
        for step in (10, 20, 30, 40):
            save_one(checkpointer, step, SMALL, scale=step, note="ü")
            if step == 20:
                wait_until(lambda: committed_steps(open_storage(slow)) == [20])
        reports = checkpointer.close()
    assert copies(reports, str(fast)) == dict.fromkeys((10, 20, 30, 40), "")
    assert copies(reports, slow) == {20: "", 40: ""}
    assert contents(slow) == contents(fast, 20) | contents(fast, 40)
    assert_holds(slow, 40, SMALL, scale=40)
    hashes = [hash_checkpoint(CheckpointReader(open_storage(url), 40)) for url in (fast, slow)]
    assert hashes[0] == hashes[1]


@pytest.mark.ci
@pytest.mark.slow
def test_ranks_in_processes_copy_the_same_step(tmp_path: Path, slow: str) -> None:
    layout = ParallelLayout.parse("tp2-dp2")
    options = ["--layout", "tp2-dp2", "--tier", slow, "--steps", "1,2,3"]
    program = [start_rank(str(tmp_path / "fast"), *options, "--rank", rank) for rank in range(layout.world_size)]
    for rank in program:
        output, _ = rank.communicate(timeout=90)
        assert rank.returncode == 0
        told = [json.loads(line) for line in output.splitlines()[1:]]
        assert [each["step"] for each in told if each["url"] != slow and each["ok"]] == [1, 2, 3]
        assert {each["step"] for each in told if each["url"] == slow} == {1, 2, 3}
    steps = committed_steps(open_storage(slow))
    assert steps[-1] == 3, "the newest is always copied"
    for step in steps:
        assert_holds(slow, step, SMALL, scale=step)
        assert contents(slow, step) == contents(tmp_path / "fast", step)


@pytest.mark.ci
@pytest.mark.slow
def test_a_slow_tier_delays_no_save_and_the_newest_step_wins(tmp_path: Path, s3_proxy: FaultProxy, s3_url: str) -> None:
    fast = tmp_path / "fast"
    s3_proxy.fault = Fault("hold", method="PUT")
    with saver(fast, Tier(s3_url), keep_last=1) as checkpointer:
        for step in (1, 2, 3, 4):
            save_one(checkpointer, step, SMALL, scale=step)
            reports = checkpointer.wait()
            assert copies(reports, str(fast)) == {step: ""}
            if step == 1:
                wait_until(lambda: s3_proxy.num_faults > 0)
        assert committed_steps(open_storage(fast)) == [1, 3, 4], "steps that are copied or wait are kept"
        assert committed_steps(open_storage(s3_url)) == []
        s3_proxy.fault = Fault()
        reports = [*reports, *checkpointer.close()]
    passed_over = copies(reports, s3_url)
    assert passed_over[3] == "passed over for step 4: the copies are slower"
    assert committed_steps(open_storage(s3_url)) == [1, 4]
    assert_holds(s3_url, 4, SMALL, scale=4)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.usefixtures("_impatient")
def test_a_dead_tier_fails_no_save_and_gets_the_step_once_it_is_back(
    tmp_path: Path, s3_proxy: FaultProxy, s3_url: str
) -> None:
    fast = tmp_path / "fast"
    s3_proxy.__exit__(None, None, None)  # connections are refused
    with saver(fast, Tier(s3_url)) as checkpointer:
        for step in (1, 2):
            save_one(checkpointer, step, SMALL, scale=step)
        reports = checkpointer.wait()
        wait_until(lambda: copies(reports.extend(checkpointer.poll()) or reports, s3_url) != {})
        assert copies(reports, str(fast)) == {1: "", 2: ""}
        assert "step 2" in copies(reports, s3_url)[1]  # given up, or passed over
        s3_proxy.__enter__()
        assert copies(checkpointer.close(), s3_url) == {2: ""}
    assert committed_steps(open_storage(s3_url)) == [2]
    assert_holds(s3_url, 2, SMALL, scale=2)


@pytest.mark.ci
@pytest.mark.slow
def test_a_writer_finishes_its_copies_after_its_trainer_was_killed(
    tmp_path: Path, s3_proxy: FaultProxy, s3_url: str
) -> None:
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=0.5)
    trainer = start_rank(str(tmp_path / "fast"), "--steps", 7, "--tier", s3_url, "--then", "kill")
    output, _ = trainer.communicate(timeout=60)
    assert trainer.returncode == -signal.SIGKILL
    writer = int(output.split()[1])
    assert committed_steps(open_storage(s3_url)) == []
    wait_until(lambda: not is_running(writer))
    for url in (tmp_path / "fast", s3_url):
        assert_holds(url, 7, SMALL, scale=7)


@pytest.mark.ci
@pytest.mark.slow
def test_a_writer_without_a_trainer_prunes_nothing(tmp_path: Path, s3_proxy: FaultProxy, s3_url: str) -> None:
    """The job's next start may be reading an older step."""
    save_whole(tmp_path, 1, SMALL)
    save_whole(s3_url, 1, SMALL)
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=0.5)
    slow = f"{s3_url},keep_last=1"
    trainer = start_rank(str(tmp_path), "--steps", 7, "--keep-last", 1, "--tier", slow, "--then", "hold")
    writer = int(trainer.stdout.readline().split()[1])
    assert trainer.stdout.readline() == "told\n"
    wait_until(lambda: s3_proxy.num_faults > 0)
    assert committed_steps(open_storage(tmp_path)) == [7], "as long as there is one it does"
    trainer.kill()
    trainer.communicate(timeout=30)
    wait_until(lambda: not is_running(writer))
    assert committed_steps(open_storage(s3_url)) == [1, 7]


@pytest.mark.ci
@pytest.mark.slow
def test_a_writer_killed_while_it_copies_leaves_nothing_listed_and_its_successor_copies_the_step(
    tmp_path: Path, s3_proxy: FaultProxy, s3_url: str
) -> None:
    fast = tmp_path / "fast"
    s3_proxy.fault = Fault("delay", method="PUT", skip=1, delay_s=30.0)
    with saver(fast, Tier(s3_url, every=10)) as checkpointer:
        save_one(checkpointer, 10, SMALL)
        assert copies(checkpointer.wait(), str(fast)) == {10: ""}
        wait_until(lambda: s3_proxy.num_faults > 0)  # the index is on its way
        os.kill(checkpointer.writer_pid, signal.SIGKILL)
        reports: list = []
        wait_until(lambda: bool(reports.extend(checkpointer.poll()) or reports))
        killed = "rank 0: the writer process was killed by SIGKILL while it copied step 10"
        assert copies(reports, s3_url) == {10: killed}
        assert committed_steps(open_storage(s3_url)) == []
        assert "step-000000010/a-0001/part-00000.safetensors" in contents(s3_url)
        s3_proxy.fault = Fault()
        save_one(checkpointer, 13, SMALL, scale=13)
        assert copies(checkpointer.close(), s3_url) == {10: ""}
    assert committed_steps(open_storage(s3_url)) == [10]
    assert_holds(s3_url, 10, SMALL)
    assert committed_steps(open_storage(fast)) == [10, 13]


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_copy_of_several_ranks_survives_the_death_of_a_writer(
    tmp_path: Path, s3_proxy: FaultProxy, s3_url: str, killed: int
) -> None:
    layout = ParallelLayout(dp=2)
    options = CheckpointerOptions(deadline_s=30.0, tiers=(Tier(s3_url, every=10),))
    ranks = [Checkpointer(str(tmp_path), rank=rank, world_size=2, attempt="a", options=options) for rank in (0, 1)]
    reports: list[list] = [[], []]

    def save(step: int) -> None:
        for rank, checkpointer in enumerate(ranks):
            save_one(checkpointer, step, SMALL, layout, rank, scale=step)
        for checkpointer, told in zip(ranks, reports, strict=True):
            told += checkpointer.wait()
            assert copies(told, str(tmp_path))[step] == ""

    s3_proxy.fault = Fault("delay", method="PUT", target=f"part-0000{killed}.safetensors", delay_s=60.0)
    save(10)
    wait_until(lambda: s3_proxy.num_faults > 0)
    os.kill(ranks[killed].writer_pid, signal.SIGKILL)
    wait_until(lambda: not ranks[killed]._writer.is_alive)
    s3_proxy.fault = Fault()
    save(13)
    for checkpointer, told in zip(ranks, reports, strict=True):
        told += checkpointer.close()
    assert [copies(told, s3_url) for told in reports] == [{10: ""}] * 2, "the last word on it"
    assert committed_steps(open_storage(s3_url)) == [10]
    assert_holds(s3_url, 10, SMALL, scale=10)


@pytest.mark.ci
@pytest.mark.slow
def test_what_a_writer_left_undone_at_the_end_is_taken_up_once(
    tmp_path: Path, s3_proxy: FaultProxy, s3_url: str
) -> None:
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=30.0)
    killed: list[int] = []
    with saver(tmp_path, Tier(s3_url)) as checkpointer:

        def kill() -> None:
            wait_until(lambda: s3_proxy.num_faults > len(killed) and checkpointer.writer_pid not in killed)
            killed.append(checkpointer.writer_pid)
            os.kill(killed[-1], signal.SIGKILL)

        save_one(checkpointer, 1, SMALL)
        checkpointer.wait()
        killer = threading.Thread(target=lambda: (kill(), kill()))
        killer.start()
        errors = [report.error for report in checkpointer.close() if report.url == s3_url]
        killer.join()
    assert errors == ["rank 0: the writer process was killed by SIGKILL while it copied step 1"] * 2
    assert len(set(killed)) == 2


@pytest.mark.ci
@pytest.mark.slow
def test_a_tier_gets_the_step_after_one_that_was_skipped(tmp_path: Path, s3_proxy: FaultProxy, s3_url: str) -> None:
    slow = str(tmp_path)
    options = CheckpointerOptions(tiers=(Tier(slow, every=20),), when_busy="skip")
    with Checkpointer(s3_url, attempt="a", options=options) as checkpointer:
        save_one(checkpointer, 10, SMALL)
        checkpointer.wait()
        s3_proxy.fault = Fault("delay", method="PUT", delay_s=0.5)
        for step in (15, 20):
            save_one(checkpointer, step, SMALL)
        assert [report.skipped for report in checkpointer.wait()] == [True, False]
        s3_proxy.fault = Fault()
        save_one(checkpointer, 30, SMALL)
        assert copies(checkpointer.close(), slow) == {30: ""}


def test_a_tier_gets_the_step_after_one_whose_save_failed(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", str(tmp_path / "slow")
    save_whole(fast, 20, SMALL, attempt="other")
    with saver(fast, Tier(slow, every=20)) as checkpointer:
        for step in (10, 20, 30):
            save_one(checkpointer, step, SMALL)
        reports = checkpointer.close()
    assert [report.ok for report in reports if report.url == str(fast)] == [True, False, True]
    assert copies(reports, slow) == {30: ""}


def test_a_run_that_was_killed_before_its_copy_copies_its_next_step(tmp_path: Path) -> None:
    slow = str(tmp_path / "slow")
    with saver(tmp_path / "fast", Tier(slow, every=100, newest=100)) as checkpointer:  # 200 was not copied any more
        for step in (210, 220):
            save_one(checkpointer, step, SMALL)
            checkpointer.wait()
        checkpointer.close()
    assert committed_steps(open_storage(slow)) == [210]


def test_the_last_step_is_copied_although_it_is_not_due(tmp_path: Path) -> None:
    slow = str(tmp_path / "slow")
    with saver(tmp_path / "fast", Tier(slow, every=10), Tier(str(tmp_path / "other"))) as checkpointer:
        save_one(checkpointer, 3, SMALL)
        checkpointer.copy_last()
        checkpointer.copy_last()  # changes nothing
        reports = checkpointer.close()
    assert [(report.step, report.error) for report in reports if report.url == slow] == [(3, "")]
    assert sorted(report.url for report in reports) == [str(tmp_path / name) for name in ("fast", "other", "slow")]
    assert_holds(slow, 3, SMALL)


def test_a_writer_that_died_after_its_save_does_not_keep_the_last_step_from_its_tiers(tmp_path: Path) -> None:
    slow = str(tmp_path / "slow")
    with saver(tmp_path / "fast", Tier(slow, every=10)) as checkpointer:
        save_one(checkpointer, 3, SMALL)
        checkpointer.wait()
        writer = checkpointer.writer_pid
        os.kill(writer, signal.SIGKILL)
        wait_until(lambda: os.waitid(os.P_PID, writer, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
        checkpointer.copy_last()
        assert copies(checkpointer.close(), slow) == {3: ""}
    assert_holds(slow, 3, SMALL)


@pytest.mark.ci
@pytest.mark.slow
def test_a_copy_that_is_not_done_when_the_time_for_closing_is_over_is_told(
    tmp_path: Path, s3_proxy: FaultProxy, s3_url: str
) -> None:
    options = CheckpointerOptions(timeout_s=3.0, tiers=(Tier(s3_url),))
    with Checkpointer(str(tmp_path), attempt="a", options=options) as checkpointer:
        checkpointer._writer.close_within_s = 0.1
        s3_proxy.fault = Fault("delay", method="PUT", delay_s=30.0)
        save_one(checkpointer, 1, SMALL)
        reports = checkpointer.close()
    late = "rank 0: the writer was not done after 3 s while it copied step 1"
    assert [(report.step, report.error) for report in reports] == [(1, ""), (1, late)]


def test_a_tier_whose_url_is_none_is_refused_before_the_first_save(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a URL"):
        saver(tmp_path / "fast", Tier("s3:/bucket/run"))


@pytest.mark.parametrize("other", ["./fast/", "link", "slow/../fast"])
def test_a_tier_that_is_another_by_another_name_is_refused(tmp_path: Path, other: str) -> None:
    (tmp_path / "link").symlink_to("fast")
    with pytest.raises(UserError, match="named twice as a tier"):
        saver(tmp_path / "fast", Tier(f"{tmp_path}/{other}"))


def test_a_save_that_failed_is_not_copied(tmp_path: Path) -> None:
    slow = str(tmp_path / "slow")
    save_whole(tmp_path / "fast", 1, SMALL, attempt="first")
    with saver(tmp_path / "fast", Tier(slow)) as checkpointer:
        save_one(checkpointer, 1, SMALL)
        checkpointer.copy_last()
        reports = checkpointer.close()
    assert [report.url for report in reports] == [str(tmp_path / "fast")]
    assert not reports[0].ok
    assert contents(slow) == {}


def test_each_tier_keeps_what_its_retention_says(tmp_path: Path) -> None:
    fast, slow, archive = (tmp_path / name for name in ("fast", "slow", "archive"))
    with saver(
        fast, Tier(str(slow), retention=Retention(keep_last=2)), Tier(str(archive)), keep_last=1
    ) as checkpointer:
        for step in (1, 2, 3, 4):
            save_one(checkpointer, step, SMALL)
            checkpointer.wait()
            wait_until(lambda step=step: all(step in committed_steps(open_storage(url)) for url in (slow, archive)))
    assert committed_steps(open_storage(archive)) == [1, 2, 3, 4]
    assert committed_steps(open_storage(slow)) == [3, 4]
    assert committed_steps(open_storage(fast))[-1] == 4
    assert 1 not in committed_steps(open_storage(fast))


def test_a_damaged_step_is_not_copied(tmp_path: Path, slow: str) -> None:
    save_whole(tmp_path / "fast", 1, SMALL)
    data = tmp_path / "fast/step-000000001/a-0001/part-00000.safetensors"
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(CheckFailed, match=r"part-00000\.safetensors is damaged between bytes"):
        copy_to_tier(tier_copy_of(tmp_path / "fast", slow))
    assert committed_steps(open_storage(slow)) == []


def test_another_try_copies_only_what_is_missing(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    save_whole(fast, 1, SMALL)
    copy_to_tier(tier_copy_of(fast, slow))
    data = slow / "step-000000001/a-0001/part-00000.safetensors"
    (slow / "step-000000001/root.json").unlink()
    before = data.stat().st_mtime_ns
    copy_to_tier(tier_copy_of(fast, slow))
    assert data.stat().st_mtime_ns == before
    assert contents(slow) == contents(fast)


@pytest.mark.parametrize("writer", [0, 1])
def test_files_of_a_committed_step_are_not_written_again(tmp_path: Path, writer: int) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    save_whole(fast, 1, SMALL)
    copy_to_tier(tier_copy_of(fast, slow))
    for path in (slow / "step-000000001/a-0001").iterdir():
        path.unlink()  # nobody may write these under a root that readers see
    order = tier_copy_of(fast, slow)
    copy_to_tier(replace(order, target=replace(order.target, writer=writer)))  # the answer to its last request was lost
    assert list(contents(slow)) == ["step-000000001/root.json"]


def test_a_choice_that_is_passed_over_meanwhile_ends_no_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, copied = queue.SimpleQueue[SaveOutcome](), list[int]()
    orders = [tier_copy_of("fast", tmp_path, step) for step in range(1, 8)]
    orders = [replace(order, target=replace(order.target, writer=1)) for order in orders]
    tier_copier = TierCopier(told.put)

    def slow_look(waiting: list[TierCopy]) -> TierCopy:
        if len(copied) == 0 and waiting[0].target.step == 1:
            tier_copier.offer(orders[1:])
        return waiting[0]

    monkeypatch.setattr(copier, "_marked", slow_look)
    monkeypatch.setattr(copier, "copy_to_tier", lambda order, striper: copied.append(order.target.step))
    tier_copier.offer(orders[:1])
    outcomes = [told.get(timeout=10) for _ in orders]
    assert copied == [4, 5, 6, 7]
    assert {outcome.step for outcome in outcomes if outcome.error} == {1, 2, 3}
    tier_copier.finish()


def test_a_copy_is_reported_whatever_comes_of_the_room_that_is_made_for_it(tmp_path: Path) -> None:
    events: list[str] = []

    def fail(tier_copy: TierCopy) -> None:
        events.append(f"room after {tier_copy.target.step}")
        raise RuntimeError("of a client library")

    copying = TierCopier(lambda outcome: events.append(f"{outcome.step} {outcome.error or 'copied'}"), on_copied=fail)
    for step in (1, 2):
        assert save_whole(tmp_path / "fast", step, SMALL).ok
        copying.offer([tier_copy_of(tmp_path / "fast", tmp_path / "slow", step)])
        copying.finish()
    assert events == ["1 copied", "room after 1", "2 copied", "room after 2"]


def test_the_leader_aborts_stale_uploads_to_its_tiers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, asked = queue.SimpleQueue[SaveOutcome](), list[str]()
    monkeypatch.setattr("ckptkit.writer.maintenance.abort_uploads", lambda storage: asked.append(storage.url))
    monkeypatch.setattr(copier, "copy_to_tier", lambda order, striper: None)
    tier_copier = TierCopier(told.put)
    for step in (1, 2):
        tier_copier.offer([tier_copy_of("fast", tmp_path / "slow", step)])
        assert told.get(timeout=10).error == ""
    assert asked == [str(tmp_path / "slow")]


def test_a_step_that_another_attempt_committed_is_left_as_it_is(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    save_whole(slow, 1, SMALL, scale=3, attempt="other")
    save_whole(fast, 1, SMALL)
    before = contents(slow)
    with pytest.raises(AlreadyExists, match="is committed already"):
        copy_to_tier(tier_copy_of(fast, slow))
    assert contents(slow) == before


def test_a_replica_of_an_older_try_gets_the_one_that_was_saved_again(tmp_path: Path) -> None:
    fast, replica = tmp_path / "fast", tmp_path / "replica"
    save_whole(replica, 1, SMALL, scale=3, attempt="older")  # copied while its node set it aside
    save_whole(fast, 1, SMALL)
    order = replace(tier_copy_of(fast, replica), of_node=True)
    with pytest.raises(AlreadyExists, match="is committed already"):  # it is the leader's to decide
        copy_to_tier(replace(order, target=replace(order.target, writer=1)))
    copy_to_tier(order)
    assert_holds(replica, 1, SMALL)
    assert (replica / "step-000000001" / "damaged-root.json").exists()


def test_memory_is_a_first_tier(tmp_path: Path) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm")
    fast = Path("/dev/shm") / f"ckptkit-{os.getpid()}"
    with saver(fast, Tier(str(tmp_path))) as checkpointer:
        try:
            save_one(checkpointer, 1, SMALL)
            assert [report.error for report in checkpointer.close()] == ["", ""]
            assert contents(fast) == contents(tmp_path)
        finally:
            open_storage(fast).delete(list(contents(fast)))
            fast.rmdir()
    assert_holds(tmp_path, 1, SMALL)


class TwoNodes:
    """Two ranks on each of two nodes with disks of their own, which saved steps 1 and 2."""

    layout = ParallelLayout.parse("tp2-dp2")

    def __init__(self, folder: Path, slow: str) -> None:
        self.folder = folder
        self.slow = slow
        replica = f"{folder}/peers/{{peer}}/replica/{{node}}"
        options = ["--layout", "tp2-dp2", "--nodes", 2, "--tier", f"{slow},every=2", "--steps", "1,2"]
        ranks = [start_rank(f"{folder}/nvme/{{node}},replica={replica}", *options, "--rank", rank) for rank in range(4)]
        for rank in ranks:
            output, _ = rank.communicate(timeout=90)
            assert rank.returncode == 0
            assert '"ok": false' not in output.replace("passed over", '"ok": true'), output

    def own(self, node: int) -> Path:
        return self.folder / "nvme" / f"n{node}"

    def replica(self, node: int) -> Path:
        return self.folder / "peers" / f"n{1 - node}" / "replica" / f"n{node}"

    def pieces(self, rank: int, arrays: dict[str, np.ndarray] | None = None) -> list[Piece]:
        return pieces_of(SMALL, self.layout, rank, arrays)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("slow", ["local", "s3"], indirect=True)
def test_nodes_save_apart_and_a_shared_tier_gets_the_whole_step(tmp_path: Path, slow: str) -> None:
    nodes = TwoNodes(tmp_path / "nodes", slow)
    for node in (0, 1):
        storage = open_storage(nodes.own(node))
        assert committed_steps(storage) == [1, 2]
        with CheckpointReader(storage, 2) as reader:
            assert verify_checkpoint(reader).ok
            assert str(reader.root.share) == f"writers {2 * node}-{2 * node + 1}"
            assert len(reader.root.parts) == 2
            with pytest.raises(UserError, match="holds one node's part of the step only"):
                hash_checkpoint(reader)
        assert contents(nodes.own(node), 2) == contents(nodes.replica(node), 2)
        for rank in (2 * node, 2 * node + 1):
            for url in (nodes.own(node), nodes.replica(node)):
                pieces = nodes.pieces(rank)
                restore(str(url), 2, pieces, tensors=SMALL)
                arrays = {name: array * 2 for name, array in values(SMALL).items()}
                assert_restored(pieces, nodes.pieces(rank, arrays))
    assert committed_steps(open_storage(slow)) == [2]
    assert_holds(slow, 2, SMALL, scale=2)
    with CheckpointReader(open_storage(slow), 2) as reader:
        assert reader.root.share is None
        assert verify_checkpoint(reader).ok
        plain = tmp_path / "plain"
        save_whole(plain, 2, SMALL, scale=2)
        assert hash_checkpoint(reader) == hash_checkpoint(CheckpointReader(open_storage(plain), 2))
