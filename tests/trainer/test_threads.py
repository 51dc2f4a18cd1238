"""Many ranks in one process: what they exchange, how they fail, and what an engine's step calls of its groups."""

from dataclasses import replace

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.mesh.test_mesh import CPU
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from trainer.config import Config
from trainer.mesh.group import Network
from trainer.mesh.layout import GROUPS
from trainer.mesh.mesh import ProcessMesh
from trainer.verify.recording import Recording, recording_of
from trainer.verify.threads import Deadlock, run_threads


def mesh_of(rank: int, layout: ParallelLayout, network: Network) -> ProcessMesh:
    return ProcessMesh(layout, rank, CPU, timeout_s=60, network=network)


def test_sixty_four_ranks_exchange() -> None:
    layout = ParallelLayout(tp=4, dp=4, pp=4)

    def exchange(rank: int, *, network: Network) -> None:
        mesh = mesh_of(rank, layout, network)
        assert mesh.world.all_reduce(torch.tensor([rank])).item() == 64 * 63 // 2
        assert mesh.tp.all_reduce(torch.tensor([rank]), "max").item() == mesh.tp.ranks[-1]
        assert mesh.dp.broadcast(torch.tensor([rank]), source=1).item() == mesh.dp.ranks[1]
        assert mesh.tp.all_gather_rows(torch.tensor([rank])).flatten().tolist() == list(mesh.tp.ranks)
        flat = torch.full((8,), float(rank))
        work = mesh.dp.start("reduce_scatter", flat)
        assert mesh.along(GROUPS["cp.dp.ends"]).size == (1 if mesh.coords.pp in (1, 2) else 8)
        total = float(sum(mesh.dp.ranks))
        assert work.wait().chunk(4)[mesh.dp.index].tolist() == [total, total]
        assert flat.isnan().sum() == 6, "what belongs to others is undefined"

    run_threads(64, exchange)


def test_what_is_sent_may_not_change_before_it_was_waited_for() -> None:
    def exchange(rank: int, *, network: Network) -> list[int]:
        mesh = mesh_of(rank, ParallelLayout(pp=2), network)
        if rank == 0:
            link = mesh.activations.following
            tensors = [torch.tensor([number]) for number in range(3)]
            works = [link.send(tensor, to=1) for tensor in tensors]
            tensors[1].fill_(9)
            return [int(work.wait()) for work in works]
        return [int(mesh.activations.previous.receive(torch.zeros(1, dtype=int), source=0).wait()) for _ in range(3)]

    assert run_threads(2, exchange)[1] == [0, 9, 2]


def test_an_error_of_one_rank_ends_all() -> None:
    def fail(rank: int, *, network: Network) -> None:
        mesh = mesh_of(rank, ParallelLayout(dp=8), network)
        mesh.dp.all_reduce(torch.zeros(1))
        if rank == 5:
            raise ValueError("a fault of rank 5")
        mesh.dp.all_reduce(torch.zeros(1))

    with pytest.raises(ValueError, match="a fault of rank 5"):
        run_threads(8, fail)


def test_a_deadlock_names_what_each_rank_waits_for() -> None:
    def lock(rank: int, *, network: Network) -> None:
        mesh = mesh_of(rank, ParallelLayout(tp=2, pp=2), network)
        if rank == 0:
            mesh.activations.following.receive(torch.zeros(1), source=1).wait()
        if rank != 1:
            mesh.tp.all_reduce(torch.zeros(1))

    with pytest.raises(Deadlock) as caught:
        run_threads(4, lock)
    assert str(caught.value) == "no rank can go on: rank 0 waits for a receive from rank 2 by activations"
    with pytest.raises(Deadlock, match=r"rank 0 waits for all_reduce 0 of world \(0, 1\), which places \[0\] joined"):
        run_threads(2, lambda rank, network: rank or mesh_of(0, ParallelLayout(dp=2), network).world.all_reduce(CALL))


CALL = torch.zeros(3)


@pytest.mark.parametrize("other", [torch.zeros(4), CALL.double(), None])
def test_calls_that_differ_are_an_error(other: torch.Tensor | None) -> None:
    def differ(rank: int, *, network: Network) -> None:
        group = mesh_of(rank, ParallelLayout(dp=2), network).dp
        if other is None and rank == 1:
            group.broadcast(CALL)
        else:
            group.all_reduce(CALL if rank == 0 or other is None else other)

    with pytest.raises(RuntimeError, match=r"calls differ: .* 0 of dp .* meets .*all_reduce 0 of dp") as caught:
        run_threads(2, differ)
    kind = "broadcast" if other is None else "all_reduce"
    assert caught.value.__notes__ == [f"in {kind} of group dp, ranks 0, 1"]


@pytest.mark.parametrize("cuts", [False, True])
def test_a_step_calls_its_groups_as_often_as_the_layout_says(cuts: bool) -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    config = small(config_for("llama", layout))
    config = replace(config, parallel=replace(config.parallel, sequence_parallel="on" if cuts else "off"))
    recorder_of = run_threads(8, recorders, config)
    num_microbatches = 8
    for rank, recorder in enumerate(recorder_of):
        is_last = layout.coords(rank).pp == 1
        num_layers = 1 if is_last else 2
        loss, embedding, head = (2, 0, 1) if is_last else (0, 1, 0)
        forward, backward = 2 * num_layers + embedding, 2 * num_layers + head
        calls = {("all_reduce", "tp"): loss} if loss else {}
        if cuts:  # what is gathered for a linear is gathered again for the gradient of its weight
            calls[("reduce_scatter", "tp")] = forward + backward
            calls[("all_gather", "tp")] = 2 * forward + backward - embedding
        else:
            calls[("all_reduce", "tp")] = forward + backward + loss
        cut = num_layers + 1  # buckets of what tp cuts: one a layer, and the embedding or the head
        whole = num_layers + is_last  # of norms: one a layer, and the last norm
        away, back = ("gradients", "activations") if is_last else ("activations", "gradients")
        assert recorder.counts() == {
            **{name: num_microbatches * number for name, number in calls.items()},
            ("all_reduce", "dp"): 1,  # the number of tokens
            ("all_reduce", "world"): 1,  # loss and squared norm
            ("reduce_scatter", "dp"): cut,
            ("all_gather", "dp"): cut,
            ("reduce_scatter", "tp.cp.dp"): whole,
            ("all_gather", "tp.cp.dp"): whole,
            ("send", away): num_microbatches,
            ("receive", back): num_microbatches,
        }
        sent = [call.num_bytes for call in recorder.calls if call.kind == "send"]
        assert sent == [8 * 16 * 32 // (2 if cuts else 1)] * num_microbatches


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_what_a_micro_batch_sends_stays_in_its_shard_group(zero_stage: int) -> None:
    """A bucket crosses replicas once a step each way; all ranks issue all calls in one order."""
    one = small(config_for("llama", ParallelLayout(dp=4), zero_stage=zero_stage))
    one = replace(one, parallel=replace(one.parallel, dp_shard=2, zero_whole_kib=0))
    recordings = run_threads(4, recorders, one)
    counts, num_microbatches = recordings[0].counts(), one.train.gradient_accumulation_steps
    cut = counts["reduce_scatter", "replica"]
    assert cut > 0
    assert counts["all_gather", "replica"] == cut
    assert counts["reduce_scatter", "shard"] == num_microbatches * cut
    gathers, several = counts["all_gather", "shard"], counts["all_gather_coalesced", "shard"]
    if zero_stage == 2:
        assert (gathers, several) == (cut, 0)
    else:  # one call a pass of a unit: a layer's matrices and norms together
        assert 3 * num_microbatches < several <= 2 * 3 * num_microbatches
        assert 2 * num_microbatches < gathers <= 2 * 3 * num_microbatches
    assert all(each.calls == recordings[0].calls for each in recordings)


def recorders(rank: int, config: Config, *, network: Network) -> Recording:
    """What a rank called in one step."""
    engine = make_engine(rank, config, network=network)
    recording_of(engine.mesh).calls.clear()
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    return recording_of(engine.mesh)
