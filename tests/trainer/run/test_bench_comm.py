"""`trainer bench comm`: each group of a layout has its rows, and bandwidths follow nccl-tests' formulas."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.training import call
from trainer.mesh.mesh import ProcessMesh
from trainer.run.bench_comm import Row, bus_factor, calls, figure_of
from trainer.run.stage_times import Nobody

OF_GROUPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert [bus_factor(name, 4) for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")] == [
        *(1.5, 0.75, 0.75, 0.75)
    ]
    assert bus_factor("send", 2) == bus_factor("broadcast", 4) == 1.0
    assert Row("dp", 2, "all_reduce", 1000, 0.5).bus_bytes_per_s == 2000.0


def test_a_process_alone_is_told_how_to_start_more(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, text in (
        ([], "one process has nobody to talk to"),
        (["--mib", "1,0"], "--mib has sizes above 0, got 1.0,0.0"),
    ):
        assert call("bench", "comm", *flags) == 2
        assert text in capsys.readouterr().err


def bench(*flags: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launcher, "-m", "trainer", "bench", "comm", "--device", "cpu", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_every_group_of_a_layout_is_timed(tmp_path: Path) -> None:
    picture = tmp_path / "comm.png"
    done = bench("--cp", 2, "--pp", 2, "--mib", "0.1,1", "--repeats", 2, "--json", "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(done.stdout)
    found = [(row["group"], row["num_ranks"], row["operation"]) for row in rows]
    of_groups = [(group, size, name) for group, size in (("cp", 2), ("world", 4)) for name in OF_GROUPS]
    assert found == [*of_groups, ("pp", 2, "send")] * 2
    assert {row["num_bytes"] for row in rows} == {104857, 1048576}
    assert all(row["seconds"] > 0 and row["bus_bytes_per_s"] > 0 for row in rows)


def test_a_panel_has_a_group_and_a_line_an_operation() -> None:
    pytest.importorskip("matplotlib")
    rows = [Row("dp", 2, "all_reduce", size, 0.5) for size in (2**21, 2**20)] + [Row("tp", 4, "broadcast", 2**20, 1.0)]
    panels = figure_of(rows).axes
    assert [panel.get_title() for panel in panels] == ["dp, 2 ranks", "tp, 4 ranks"]
    assert [line.get_label() for line in panels[0].lines] == ["all_reduce"]
    assert list(panels[0].lines[0].get_xdata()) == [1, 2]


def test_shard_groups_and_their_replicas_are_timed() -> None:
    layout, cpu = ParallelLayout(tp=2, dp=4), torch.device("cpu")
    for dp_shard, names in ((2, ["tp", "dp", "shard", "replica", "world"]), (0, ["tp", "dp", "world"])):
        mesh = ProcessMesh(layout, 5, cpu, timeout_s=60, dp_shard=dp_shard, network=Nobody(8))
        assert [*dict.fromkeys(name for _, name, _, _ in calls(mesh, 64))] == names


def test_each_operation_of_each_group_is_timed() -> None:
    layout, cpu = ParallelLayout(tp=2, cp=4), torch.device("cpu")
    mesh = ProcessMesh(layout, 3, cpu, timeout_s=60, network=Nobody(8))
    found = [(name, operation) for _, name, operation, call in calls(mesh, 64) if call() is None]
    assert found == [(group, name) for group in ("tp", "cp", "world") for name in OF_GROUPS]


@pytest.mark.slow
def test_a_layout_that_does_not_fit_is_one_error() -> None:
    done = bench("--tp", 3)
    assert done.returncode != 0
    assert "layout tp3 needs 3 processes, started are 4" in done.stderr
