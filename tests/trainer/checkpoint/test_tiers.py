"""Runs that save to several tiers, and come back from whatever is left of them."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from ckptkit.format.keys import ROOT_KEY, step_folder
from ckptkit.loading.roots import committed_attempt
from ckptkit.runs.catalogue import committed_steps
from tests.support.small_disk import small_disk
from tests.trainer.support.training import ROOT, call, curve, hash_of, kill, lines
from threefold.storage import open_storage

Console = pytest.CaptureFixture[str]


def steps(url: str | Path) -> list[int]:
    return committed_steps(open_storage(url))


def damage(run: Path, step: int) -> Path:
    """Flip one bit of a step's data."""
    [data] = (run / f"step-{step:09d}").glob("*/part-00000.safetensors")
    content = bytearray(data.read_bytes())
    content[-8] ^= 1
    data.write_bytes(content)
    return data


@pytest.mark.ci
@pytest.mark.slow
def test_a_run_comes_back_from_the_newest_sound_step_of_any_tier(
    job_config: Path, tmp_path: Path, capsys: Console
) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    flags = ["--save", f"{fast},keep_last=2", "--save", f"{slow},every=4", "--save-interval", 2]
    flags += ["--optim.decay-steps", 12]

    def run(to: int, metrics: str) -> str:
        assert call("train", job_config, *flags, "--train-steps", to, "--metrics", tmp_path / metrics) == 0
        return capsys.readouterr().err

    run(6, "a.jsonl")
    assert steps(fast)[-2:] == [4, 6]
    assert steps(slow) == [4, 6], "the last step goes everywhere"
    assert {(line["step"], line["ok"], line["url"]) for line in lines(tmp_path / "a.jsonl", "copy")} == {
        (step, True, str(slow)) for step in (4, 6)
    }
    shutil.rmtree(fast)
    assert f"resumed from step 6 of {slow}" in run(8, "b.jsonl")
    assert steps(fast) == [8]
    data = damage(fast, 8)
    said = run(10, "c.jsonl")
    assert str(data) in said
    assert f"falling back from step 8 to step 8 of {slow}" in said
    assert f"resumed from step 8 of {slow}" in said
    assert steps(fast) == [10]
    assert (fast / "step-000000008" / "damaged-root.json").exists()
    damage(fast, 10)
    damage(slow, 10)
    assert "falling back from step 10 to step 8" in run(10, "d.jsonl")
    assert (steps(fast), steps(slow)) == ([10], [4, 6, 8, 10]), "saved and copied anew"
    assert curve(tmp_path / "d.jsonl") == {step: curve(tmp_path / "c.jsonl")[step] for step in (9, 10)}
    assert hash_of(fast, 10) == hash_of(slow, 10)


def test_a_copy_that_a_killed_run_still_owed_is_made_up_for_by_the_next_save(
    job_config: Path, tmp_path: Path, capsys: Console
) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    flags = ["--save", fast, "--save", f"{slow},every=4", "--save-interval", 2, "--optim.decay-steps", 12]
    assert call("train", job_config, *flags, "--train-steps", 4) == 0
    shutil.rmtree(slow)
    assert call("train", job_config, *flags, "--train-steps", 7, "--metrics", tmp_path / "m.jsonl") == 0
    assert f"resumed from step 4 of {fast}" in capsys.readouterr().err
    assert steps(fast) == [2, 4, 6, 7]
    copied = [line["step"] for line in lines(tmp_path / "m.jsonl", "copy")]
    assert copied == [6, 7], "6 in the place of 4, 7 as the last one"


@pytest.mark.slow
def test_a_tier_that_is_gone_is_told_and_ends_nothing(job_config: Path, tmp_path: Path, capsys: Console) -> None:
    (tmp_path / "file").touch()
    slow = tmp_path / "file" / "slow"
    flags = ["--save", tmp_path / "fast", "--save", f"{slow},every=2", "--save-interval", 1, "--train-steps", 2]
    assert call("train", job_config, *flags, "--metrics", tmp_path / "m.jsonl") == 0
    assert steps(tmp_path / "fast") == [1, 2]
    assert f"warning: step 2 was not copied to {slow}: cannot write" in capsys.readouterr().err
    [copy] = lines(tmp_path / "m.jsonl", "copy")
    assert (copy["step"], copy["ok"]) == (2, False)


class TwoNodes:
    """A job of one rank on each of two nodes, each started by a torchrun of its own."""

    def __init__(self, folder: Path, *arguments: object, rules: str = "", interval: int = 4) -> None:
        self.folder = folder
        places = f"{folder}/nvme/{{node}}{rules},replica={folder}/peers/{{peer}}/replica/{{node}}"
        saves = ["--save", places, "--save", f"{folder}/slow,every=8", "--save-interval", interval]
        self._arguments = [str(each) for each in (*arguments, *saves)]

    def own(self, node: int) -> Path:
        return self.folder / "nvme" / f"n{node}"

    def replica(self, node: int) -> Path:
        return self.folder / "peers" / f"n{1 - node}" / "replica" / f"n{node}"

    def run(self, to: int, metrics: Path) -> str:
        """Train to a step; what both nodes said."""
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        nodes = []
        for rank in (0, 1):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
            launcher += [f"--node-rank={rank}", "--master-addr=127.0.0.1", f"--master-port={port}"]
            program = ["-m", "trainer", "train", *self._arguments, "--train-steps", str(to), "--metrics", str(metrics)]
            nodes.append(
                subprocess.Popen(
                    [*launcher, *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "THREEFOLD_NODE": f"n{rank}"},
                )
            )  # fmt: skip
        try:
            said = [node.communicate(timeout=240)[0] for node in nodes]
        finally:
            for node in nodes:
                kill(node)
        assert [node.returncode for node in nodes] == [0, 0], said
        return "\n".join(said)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("axis", ["--pp", "--dp"])
def test_a_node_that_lost_its_disk_resumes_from_its_replica_bit_for_bit(
    job_config: Path, tmp_path: Path, axis: str
) -> None:
    nodes = TwoNodes(tmp_path / "job", job_config, axis, 2, "--train.precision", "bf16")
    nodes.run(8, tmp_path / "a.jsonl")
    slow = tmp_path / "job" / "slow"
    assert steps(slow) == [8]
    whole = hash_of(slow, 8)
    for node in (0, 1):
        assert steps(nodes.own(node)) == steps(nodes.replica(node)) == [4, 8]
    shutil.rmtree(nodes.own(1))
    for place in (nodes.own(0), nodes.replica(0), nodes.replica(1), slow):
        shutil.rmtree(place / "step-000000008")
    printed = nodes.run(8, tmp_path / "b.jsonl")
    assert f"resumed from step 4 of {nodes.folder}/nvme/{{node}}" in printed
    expected = curve(tmp_path / "a.jsonl")
    assert curve(tmp_path / "b.jsonl") == {step: expected[step] for step in (5, 6, 7, 8)}
    assert hash_of(slow, 8) == whole
    assert steps(nodes.own(1)) == [8]

    shutil.rmtree(nodes.replica(1) / "step-000000008")  # and of node 1's own step 8 nothing else is left
    data = next((nodes.own(1) / "step-000000008").glob("*/part-00001.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])
    printed = nodes.run(12, tmp_path / "c.jsonl")
    assert "falling back from step 8 to step 8 of" in printed
    assert f"resumed from step 8 of {slow}" in printed
    assert steps(slow) == [8, 12]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_that_fails_to_save_costs_no_whole_step_and_the_last_one_is_saved_again(
    job_config: Path, tmp_path: Path
) -> None:
    nodes = TwoNodes(tmp_path, job_config, "--dp", 2, "--checkpoint.max-failed-saves", 20, rules=",keep_last=1")
    nodes.own(1).mkdir(parents=True)
    for step in (8, 10):
        (nodes.own(1) / step_folder(step)).touch()  # so that no folder can be made there

    def make_way() -> None:
        while not (nodes.own(0) / step_folder(10) / ROOT_KEY).exists():
            time.sleep(0.01)
        (nodes.own(1) / step_folder(10)).unlink()

    threading.Thread(target=make_way, daemon=True).start()
    assert "saving step 10 again" in nodes.run(10, tmp_path / "a.jsonl")
    assert steps(nodes.own(0)) == steps(nodes.own(1)) == [4, 10]
    assert committed_attempt(open_storage(nodes.own(0)), 10) == committed_attempt(open_storage(nodes.own(1)), 10)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_whose_disk_stays_full_saves_to_the_slower_tier_with_the_others(
    job_config: Path, tmp_path: Path
) -> None:
    """The run ends well and goes on from there, though it is the first node's, which commits."""
    flags = ["--dp", 2, "--optim.decay-steps", 12]
    nodes = TwoNodes(tmp_path / "job", job_config, *flags, rules=",keep_last=1", interval=1)
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        nodes.own(0).parent.mkdir(parents=True)
        nodes.own(0).symlink_to(disk)
        with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        nodes.run(9, tmp_path / "a.jsonl")
        slow = tmp_path / "job" / "slow"
        found = steps(slow)
        assert found[-1] == 9, "the last step is whole nowhere else"
        assert all(after - before <= 3 for before, after in pairwise([0, *found])), found
        assert f"resumed from step 9 of {slow}" in nodes.run(11, tmp_path / "b.jsonl")
        assert steps(nodes.own(0)) == []
    assert steps(slow)[-1] == 11
    TwoNodes(tmp_path / "whole", job_config, *flags).run(11, tmp_path / "whole.jsonl")
    assert curve(tmp_path / "a.jsonl") | curve(tmp_path / "b.jsonl") == curve(tmp_path / "whole.jsonl")
    assert hash_of(slow, 11) == hash_of(tmp_path / "whole" / "slow", 11)
