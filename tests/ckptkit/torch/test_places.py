"""A run whose first tier is each node's own: what its nodes hold together is loaded, whatever one of them lost."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import CheckpointerOptions, Node, Retention, Tier, nodes_of
from ckptkit import Run as AnyRun
from ckptkit.torch import Run
from tests.ckptkit.support.node_job import Job, state_of
from tests.ckptkit.support.saves import wait_until
from tests.ckptkit.support.thread_exchange import ThreadExchange
from threefold.errors import CheckFailed, UserError

Console = pytest.CaptureFixture[str]
LONG = [pytest.mark.slow, pytest.mark.ci]


def damage(folder: Path, step: int, writer: int) -> Path:
    """Flip a bit of the data of a step that a writer wrote."""
    [data] = folder.glob(f"step-{step:09d}/*/part-{writer:05d}.safetensors")
    content = bytearray(data.read_bytes())
    content[-20] ^= 1
    data.write_bytes(content)
    return data


def test_each_rank_gets_what_ranks_of_other_nodes_wrote(tmp_path: Path) -> None:
    job = Job(tmp_path, replica=False)
    job.save(2, 4)
    assert job.steps() == [[2, 4], [2, 4]]
    shares = [AnyRun(job.disk(name)).root(4).share for name in ("n0", "n1")]
    assert [(share.first, share.count, share.of) for share in shares if share] == [(0, 2, 4), (2, 2, 4)]
    for report in job.load():
        assert (report.step, report.metrics) == (4, {"loss": 4.0})
        assert report.num_certified > 4
    assert job.load(2)[3].step == 2


@pytest.mark.ci
@pytest.mark.slow
def test_a_lost_disk_is_read_from_the_replica_and_else_from_a_slower_tier(tmp_path: Path, capfd: Console) -> None:
    job = Job(tmp_path, slower=4)
    job.save(4, 6)
    shutil.rmtree(job.disk("n1"))
    assert {report.step for report in job.load()} == {6}
    shutil.rmtree(job.replica("n1", "n0"))
    printed = capfd.readouterr().err
    shutil.rmtree(tmp_path / "slow" / "step-000000006")  # the last step went there too
    assert {report.step for report in job.load()} == {4}
    printed = capfd.readouterr().err
    lacks = "no node that is here has the files of writers 2, 3 of 4"
    assert f"step 6 of {tmp_path}/machine-n0/{{node}} is not whole: {lacks}" in printed
    assert "steps 4, 6 of" in printed
    assert "set aside" in printed
    assert job.steps() == [[], []]
    job.save(6)
    assert job.load()[0].step == 6


@pytest.mark.slow
@pytest.mark.ci
def test_damage_is_read_from_the_replica_and_else_all_nodes_fall_back(tmp_path: Path, capfd: Console) -> None:
    job = Job(tmp_path)
    job.save(2, 4)
    first, second = damage(job.disk("n0"), 4, 1), damage(job.replica("n1", "n0"), 4, 2)
    assert {report.step for report in job.load()} == {4}
    said = capfd.readouterr().err
    assert str(first) in said
    assert "another copy of it is read" in said
    assert str(second) not in said
    damage(job.disk("n1"), 4, 2)
    assert {report.step for report in job.load()} == {2}
    assert "falling back from step 4 to step 2" in capfd.readouterr().err
    assert job.steps() == [[2], [2]]
    assert (job.disk("n0") / "step-000000004" / "damaged-root.json").exists()
    job.save(4)
    assert job.steps() == [[2, 4], [2, 4]]


@pytest.mark.parametrize(
    "sizes", [pytest.param((3,), marks=LONG), (1, 2), *(pytest.param(each, marks=LONG) for each in ((2, 1, 1), (6, 1)))]
)
def test_what_is_there_of_a_step_is_loaded_by_other_ranks_and_nodes(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    job = Job(tmp_path)
    job.save(2)
    other = Job(tmp_path, sizes)
    if len(sizes) == 1:  # that node holds its own files, and no other is here
        with pytest.raises(CheckFailed, match="no node that is here has the files of writers 2, 3 of 4"):
            other.load()
        return
    assert {report.step for report in other.load(strict=len(other.nodes) == 4)} == {2}


@pytest.mark.parametrize("sizes", [*(pytest.param(each, marks=LONG) for each in ((1,), (2,))), (2, 1)])
def test_one_rank_one_node_and_uneven_nodes(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    job = Job(tmp_path, sizes, slower=2)
    job.save(1, 3)
    assert AnyRun(tmp_path / "slow").steps() == [3]
    assert job.load()[0].step == 3
    shutil.rmtree(job.disk("n0"))
    assert job.load()[-1].step == 3


@pytest.mark.slow
@pytest.mark.ci
def test_what_is_not_whole_is_no_step_and_not_in_the_way(tmp_path: Path, capfd: Console) -> None:
    job = Job(tmp_path, replica=False)
    job.save(2, 4)
    shutil.rmtree(job.disk("n1"))

    def save_again(run: Run, rank: int) -> tuple[int | None, list[int]]:
        newest = run.newest()
        run.save(4, state_of(rank, 4))
        run.wait()
        return newest, list(run.newest_first())

    assert job.run(save_again) == [(None, [4])] * 4
    assert "step 4 of" in (said := capfd.readouterr().err)
    assert "is not whole: no node that is here has the files of writers 2, 3 of 4; it is set aside" in said
    assert job.steps() == [[2, 4], [4]]
    assert job.load()[0].step == 4


@pytest.mark.ci
@pytest.mark.slow
def test_a_step_that_is_named_is_looked_for_in_all_places(tmp_path: Path) -> None:
    job = Job(tmp_path, replica=False, slower=2)
    job.save(2, 4)

    def look(run: Run, rank: int) -> tuple[int | None, list[int], int]:
        return run.newest(), list(run.newest_first()), run.load(state_of(rank, 0)).step

    assert job.run(look, step="/step-000000002") == [(2, [2], 2)] * 4
    shutil.rmtree(job.disk("n0"))
    assert job.run(look, step="/step-000000002") == [(2, [2], 2)] * 4
    assert job.load(2)[0].step == 2
    assert job.steps() == [[], [2, 4]]
    with pytest.raises(UserError, match=r"no node holds step 3 of .*\{node\}, nor does .*slow"):
        job.load(3)
    job.run(lambda run, rank: run.rollback(2))
    assert (job.steps(), AnyRun(tmp_path / "slow").steps()) == ([[], [2]], [2])


@pytest.mark.slow
@pytest.mark.ci
def test_roots_of_different_tries_are_not_one_step(tmp_path: Path) -> None:
    one, other = Job(tmp_path / "a", replica=False), Job(tmp_path / "b", replica=False)
    for job in (one, other):
        job.save(2)
    shutil.rmtree(one.disk("n1"))
    shutil.copytree(other.disk("n1"), one.disk("n1"))
    with pytest.raises(CheckFailed, match="no node that is here has the files of writers") as lacking:
        one.load()
    assert "a slower tier" in str(lacking.value.hint)


@pytest.mark.slow
@pytest.mark.ci
def test_rollback_goes_back_on_all_nodes(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.save(2, 4, 6)

    def go_back(run: Run, rank: int) -> list[int]:
        run.rollback(2, dry_run=True)
        return run.rollback(2).set_aside

    assert job.run(go_back) == [[6, 4]] * 4
    assert job.steps() == [[2], [2]]
    assert job.load()[0].step == 2
    job.save(4)
    with pytest.raises(UserError, match="no node holds step 6 of"):
        job.run(lambda run, rank: run.rollback(6))


@pytest.mark.slow
@pytest.mark.ci
def test_retention_keeps_as_many_steps_on_each_node_and_replica(tmp_path: Path) -> None:
    job = Job(tmp_path)

    def save(run: Run, rank: int) -> None:
        for step in (1, 2, 3, 4):
            run.save(step, state_of(rank, step))
            run.wait()
            wait_until(lambda: not run.copied_steps)  # one that copies pass over would be missing in the replica

    job.run(save, retention=Retention(keep_last=2))
    assert job.steps() == [[3, 4], [3, 4]]
    assert AnyRun(job.replica("n1", "n0")).steps() == [3, 4]


def test_one_folder_of_two_nodes_is_refused(tmp_path: Path) -> None:
    nodes = nodes_of(["a", "b"], [0, 1])

    def save(exchange: ThreadExchange) -> None:
        options = CheckpointerOptions(node=nodes[exchange.rank])
        with Run(str(tmp_path / "run"), options, exchange=exchange) as run:
            run.save(1, {"x": torch.ones(3)})

    with pytest.raises(UserError, match="is one folder of the nodes"):
        ThreadExchange(2).run(save)
    assert list((tmp_path / "run").iterdir()) == []


NODE = Node("n0", "n0", 0, 1, 1)


@pytest.mark.parametrize(
    ("url", "options", "what"),
    [
        ("/nvme/{peer}", {}, "{peer} has a meaning in a replica only"),
        ("/nvme", {"tiers": (Tier("/p/{peer}/{node}"),)}, "is one place for all nodes"),
        ("/nvme/{node}", {"tiers": (Tier("/p/{node}"),)}, "only a replica is of one node"),
        ("/nvme/{node}", {"tiers": (Tier("/p/{peer}/{node}", every=3),)}, "takes every save"),
        ("/nvme/{node}", {"tiers": (Tier("/p/{peer}/{node}"), Tier("/q/{peer}/{node}"))}, "are two replicas"),
    ],
)
def test_places_that_do_not_go_together_are_refused_when_the_run_is_made(
    url: str, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(UserError, match=re.escape(what)) as refused:
        Run(url, CheckpointerOptions(**options))
    assert refused.value.hint


def test_a_rank_that_is_on_another_node_than_all_say_is_refused(tmp_path: Path) -> None:
    nodes = [Node("a", "b", 0, 1, 2), Node("b", "a", 0, 2, 2)]

    def load(exchange: ThreadExchange) -> None:
        with Run(str(tmp_path / "{node}"), CheckpointerOptions(node=nodes[exchange.rank]), exchange=exchange) as run:
            run.newest()

    with pytest.raises(UserError, match="by what all ranks say it is on"):
        ThreadExchange(2).run(load)
