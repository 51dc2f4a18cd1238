"""Optimizer state that is streamed from host memory: the bits of state on the device, and no waits of the host."""

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import ParallelLayout
from tests.trainer.support.parity import config_for, in_groups, local_batch, small
from threefold.errors import UserError
from trainer.checkpoint.mapping import saved_pieces
from trainer.config import Config
from trainer.config.check import cross_faults
from trainer.engine import Engine
from trainer.mesh.group import Network
from trainer.mesh.mesh import mesh_of
from trainer.mesh.processes import Processes
from trainer.run.banner import offload_text
from trainer.store.host_memory import available_bytes, refuse_without_room, zeros_near
from trainer.store.numa import cores_of, node_at, on_cores
from trainer.store.window import cuts_of
from trainer.verify.bench import Bench
from trainer.verify.checks import CHECKS, run_check
from trainer.verify.faults.fault import ANOTHER_LAYOUT, RESUME, WAITS
from trainer.verify.faults.fault import config_of as config_of_fault
from trainer.verify.faults.named import FAULTS
from trainer.verify.faults.search import run_of
from trainer.verify.host_waits import no_host_waits
from trainer.verify.late_lanes import streaming_on_cpu
from trainer.verify.shrink import Shrunk
from trainer.verify.threads import run_threads

NUM_STEPS = 4
CPU = torch.device("cpu")


def config_of(layout: str, precision: str, *, parallel: dict[str, Any] | None = None, **optim: Any) -> Config:
    config = small(config_for("llama", ParallelLayout.parse(layout), precision=precision))
    parallel = parallel or {}
    return replace(config, optim=replace(config.optim, **optim), parallel=replace(config.parallel, **parallel))


def trained(rank: int, config: Config, streaming: bool, *, network: Network | None = None) -> dict[str, Any]:
    torch.autograd.set_multithreading_enabled(False)
    mesh = mesh_of(config, rank, CPU, network=network or Processes(CPU, timeout_s=60))
    engine = Engine(config, mesh, streaming=streaming_on_cpu() if streaming else None)
    engine.initialise()
    losses = [engine.train_step(step, local_batch(config, step, mesh)).loss for step in range(NUM_STEPS)]
    evaluation = engine.eval_batch(in_groups(local_batch(config, 99, mesh)))
    engine.store.join_masters()
    return {"losses": losses, "evaluation": evaluation, "pieces": pieces_of(engine)}


def pieces_of(engine: Engine) -> list[torch.Tensor]:
    return [piece.data.cpu().clone() for piece in saved_pieces(engine.store)]


def on_ranks(config: Config, streaming: bool) -> list[dict[str, Any]]:
    parallel = config.parallel
    num_ranks = parallel.tp * parallel.pp * parallel.dp
    return run_threads(num_ranks, trained, config, streaming) if num_ranks > 1 else [trained(0, config, streaming)]


def assert_same(config: Config) -> None:
    for plain, streamed in zip(on_ranks(config, False), on_ranks(config, True), strict=True):
        assert streamed["losses"] == plain["losses"]
        assert streamed["evaluation"] == plain["evaluation"]
        pairs = list(zip(plain["pieces"], streamed["pieces"], strict=True))
        assert pairs
        assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("precision", "optim"),
    [
        ("bf16", {}),
        ("bf16", {"master": "split"}),
        ("bf16", {"master": "split", "moments": "bf16"}),
        ("fp16", {}),
        ("fp32", {}),
        ("bf16", {"name": "lion"}),
        ("fp64", {"name": "sgd"}),
    ],
)
def test_streamed_state_has_the_bits_of_resident_state(precision: str, optim: dict[str, Any]) -> None:
    assert_same(config_of("tp1", precision, **optim))


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_under_each_zero_stage(stage: int) -> None:
    assert_same(config_of("dp2", "bf16", parallel={"zero_stage": stage, "zero_whole_kib": 0}))


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_under_each_schedule(schedule: str) -> None:
    assert_same(config_of("pp2", "bf16", parallel={"schedule": schedule, "overlap_param_gather": schedule != "gpipe"}))


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("check", [RESUME, ANOTHER_LAYOUT, WAITS])
def test_a_run_that_streams_passes_checks_of_resumes_and_waits(tmp_path: Path, check: str) -> None:
    fault = FAULTS["streamed-moment-late"]
    bench = Bench(Shrunk(config_of_fault(fault), ()), run_of(fault), tmp_path)
    assert run_check(check, CHECKS[check], bench).state == "ok"


def test_pieces_are_cut_where_kernels_go_on_as_before() -> None:
    assert cuts_of(200, 12, 1600) == [(0, 128), (128, 200)]
    assert cuts_of(0, 12, 1600) == []


def test_what_cannot_be_streamed_is_refused() -> None:
    config = config_of("tp1", "bf16", offload=True)
    gpu = replace(config, train=replace(config.train, device="auto", cuda_graphs=True))
    assert any("optim.offload loads states" in reason for _, reason in cross_faults(gpu, 1))
    assert not cross_faults(replace(gpu, train=replace(gpu.train, cuda_graphs=False)), 1)
    assert list(offload_text(config, CPU)) == ["no effect: a CPU has masters and moments in the host's memory anyway"]


def test_too_little_host_memory_is_an_error_that_says_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_of(config_of("tp1", "bf16"), 0, CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    words = {"option": "optim.offload", "hint": "take less"}
    refuse_without_room(1, mesh.world, CPU, **words)
    with pytest.raises(
        UserError, match=r"optim.offload needs 8388608.00 GiB .*4 ranks of a node take 2097152.00 GiB e"
    ):
        refuse_without_room(1 << 51, mesh.world, CPU, **words)
    (tmp_path / "meminfo").write_text("MemTotal: 16 kB\nMemAvailable: 8 kB\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == 8192
    (tmp_path / "memory.max").write_text("6000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == 5000


def test_memory_is_touched_by_a_thread_near_the_gpu(tmp_path: Path) -> None:
    (tmp_path / "0000:1b:00.0").mkdir()
    for text, node in (("1\n", 1), ("-1\n", None)):
        (tmp_path / "0000:1b:00.0" / "numa_node").write_text(text)
        assert node_at("0000:1b:00.0", tmp_path) == node
    assert node_at("0000:1c:00.0", tmp_path) is None
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("0-2,8,10-11\n")
    assert cores_of(1, tmp_path) == {0, 1, 2, 8, 10, 11}
    assert cores_of(None, tmp_path) == set()
    before = os.sched_getaffinity(0)
    with on_cores({max(before)}) as is_near:
        assert is_near
        assert os.sched_getaffinity(0) == {max(before)}
    assert os.sched_getaffinity(0) == before
    for cores, is_touched in (({4095}, False), ((), False), (before, True)):  # not here, none, and here
        pages = resident_pages()
        memory = zeros_near(64 << 20, cores)
        assert (resident_pages() - pages > 8000) == is_touched
        assert not memory.any()
        assert os.sched_getaffinity(0) == before
        del memory


def resident_pages() -> int:
    """Pages of memory that this process has touched."""
    return int(Path("/proc/self/statm").read_text().split()[1])


def on_gpu(config: Config, *, offload: bool) -> tuple[dict[str, Any], int, int]:
    """What training gives on a GPU without a wait, the most memory that it reserved, and that of its state."""
    gc.collect()  # an engine of before has cycles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    device = torch.device("cuda", 0)
    own = replace(config, optim=replace(config.optim, offload=offload))
    engine = Engine(own, mesh_of(own, 0, device))
    engine.initialise()
    losses = []
    for step in range(6):
        batch = local_batch(own, step, engine.mesh)
        with no_host_waits("cuda" if step > 1 else "cpu"):
            pending = engine.start_step(step, batch)
        losses.append(pending.read().loss)
    engine.store.join_masters()
    torch.cuda.synchronize()
    kept = sum(tensor.nbytes for bucket in engine.store.buckets for tensor in bucket.streamed.values())
    return {"losses": losses, "pieces": pieces_of(engine)}, torch.cuda.max_memory_reserved(), kept


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.cuda
@pytest.mark.parametrize("optim", [{}, {"master": "split"}, {"moments": "bf16"}, {"name": "lion"}])
def test_a_gpu_keeps_a_window_of_the_state(optim: dict[str, Any]) -> None:
    config = config_for("llama", ParallelLayout(), device="cuda", precision="bf16")
    model = replace(config.model, hidden_size=2048, ffn_hidden_size=8192, num_layers=8, dropout=0.0)
    optim = {"offload_window_mib": 1024, **optim}
    config = replace(config, model=model, optim=replace(config.optim, **optim))
    plain, resident_peak, kept = on_gpu(config, offload=False)
    streamed, peak, _ = on_gpu(config, offload=True)
    assert streamed["losses"] == plain["losses"]
    assert all(map(torch.equal, streamed["pieces"], plain["pieces"]))
    assert resident_peak - peak >= 0.9 * (kept - (1 << 30))
