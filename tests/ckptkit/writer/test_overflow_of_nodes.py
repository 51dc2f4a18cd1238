"""Saves of several nodes with a disk each, one of them full: its part goes to where the others copy theirs."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptkit.handoff.report import SaveReport
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.retention import Retention
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from ckptkit.tiers.tier import Tier, nodes_of
from tests.ckptkit.support.model_tables import gpt_tensors
from tests.ckptkit.support.saves import assert_holds, save_one
from tests.support.small_disk import small_disk
from threefold.storage import open_storage

TENSORS = gpt_tensors(hidden=64, kv=32, ffn=96, vocab=61)
STEP_BYTES = sum(info.size_bytes for info in TENSORS)
FOUR = ParallelLayout(tp=2, dp=2)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", int(STEP_BYTES * 2.7)) as folder:
        yield folder


def steps_of(run: Path) -> list[int]:
    return committed_steps(open_storage(run))


class TwoNodes:
    """Two ranks on each of two nodes with a disk of their own, who all know of a save that failed on any."""

    def __init__(
        self, first: Path, second: Path, slow: Path, every: int = 100, keep_last: int = 0, **options: Any
    ) -> None:  # fmt: skip
        set_options = CheckpointerOptions(deadline_s=20.0, tiers=(Tier(str(slow), every=every, newest=0),),
                                    retention=Retention(keep_last=keep_last), **options)  # fmt: skip
        names = [first.name, first.name, second.name, second.name]
        self.slow, self.num_known_failed, self.num_failed = slow, 0, 0
        self.savers = [
            Checkpointer(
                str([first, second][rank // 2]),
                rank=rank,
                world_size=4,
                attempt="b",
                options=replace(set_options, node=node),
            )
            for rank, node in enumerate(nodes_of(names, [0, 0, 2, 2]))
        ]
        self.copies = list[SaveReport]()

    def save(self, step: int) -> list[SaveReport]:
        """Save a step on all ranks; its reports, one a rank."""
        if self.num_failed > self.num_known_failed:
            for each in self.savers:
                each.copy_next()
        self.num_known_failed = self.num_failed
        for rank, each in enumerate(self.savers):
            save_one(each, step, TENSORS, FOUR, rank, scale=step)
        reports = [report for each in self.savers for report in each.wait()]
        self.copies += [report for report in reports if report.url == str(self.slow)]
        saves = [report for report in reports if report.url != str(self.slow)]
        self.num_failed = 0 if all(report.ok for report in saves) else self.num_failed + 1
        return saves

    def close(self) -> None:
        for each in self.savers:
            each.copy_last()
        self.copies += [report for each in self.savers for report in each.close()]


def fill_up(folder: Path) -> None:
    """Leave no room on a disk."""
    with suppress(OSError), (folder / "ballast").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("full", [0, 1])
def test_a_node_with_a_full_disk_brings_its_part_to_where_the_others_copy_theirs(
    disk: Path, tmp_path: Path, full: int
) -> None:
    """The first node's writer, which commits there, too; of the steps that are not due there one is lost each time."""
    slow, other = tmp_path / "slow", tmp_path / "other"
    folders = [disk / "run", other] if full == 0 else [other, disk / "run"]
    nodes = TwoNodes(*folders, slow)
    assert all(report.ok for report in nodes.save(1))
    fill_up(disk)
    for step in range(2, 6):
        reports = nodes.save(step)
        ranks = reports[2 * full : 2 * full + 2]
        is_there = step % 2 == 1
        assert all(report.ok for report in reports if report not in ranks)
        assert [report.ok for report in ranks] == [is_there] * 2, ranks
        if is_there:
            assert {report.warning for report in ranks} == {f"in {slow}, as {disk / 'run'} has no room"}
            assert_holds(slow, step, TENSORS, scale=step)
    nodes.close()
    assert steps_of(slow) == [3, 5]
    assert all(report.ok for report in nodes.copies), nodes.copies
    assert steps_of(disk / "run") == [1]
    assert steps_of(other) == list(range(1, 6))
    assert not [path for path in slow.rglob("*") if path.name in ("copying", "ballast") or path.suffix == ".failed"]


def test_a_last_step_that_one_node_has_is_saved_again_to_the_slower_tier(disk: Path, tmp_path: Path) -> None:
    nodes = TwoNodes(tmp_path / "other", disk / "run", tmp_path / "slow")
    fill_up(disk)
    assert not all(report.ok for report in nodes.save(5))
    assert all(report.ok for report in nodes.save(5))
    nodes.close()
    assert_holds(tmp_path / "slow", 5, TENSORS, scale=5)


def test_a_node_whose_disk_fails_otherwise_is_not_waited_for(disk: Path, tmp_path: Path) -> None:
    """What it has not saved it cannot copy; the full one learns of it."""
    (tmp_path / "other").mkdir()
    nodes = TwoNodes(tmp_path / "other", disk / "run", tmp_path / "slow", every=1, retry_s=0.0)
    fill_up(disk)
    (tmp_path / "other" / "step-000000005").write_text("not a folder")
    reports = nodes.save(5)
    assert not any(report.ok for report in reports)
    assert all("writer 0 failed: " in report.error for report in reports[2:])  # said, not found out by the deadline
    nodes.close()
    assert steps_of(tmp_path / "slow") == []
