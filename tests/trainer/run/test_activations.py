"""What a rank keeps by arithmetic, and what the graph of a forward pass really holds."""

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.checks import require
from tests.trainer.support.parity import make_engine
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.config.walk import config_from
from trainer.engine import Engine
from trainer.mesh.group import Network
from trainer.mesh.mesh import ProcessMesh
from trainer.run.activations import CHOICES, activation_bytes
from trainer.run.stage_times import random_batch
from trainer.verify.threads import run_threads

MODELS = {
    "llama": {"num_kv_heads": 2},
    "qwen": {"num_kv_heads": 1, "qk_norm": True},
    "gpt2": {"activation": "gelu", "norm": "layernorm", "bias": True, "position": "learned", "tie_embeddings": True},
    "experts": {"num_experts": 8, "expert_ffn_hidden_size": 96, "num_shared_experts": 1, "first_dense_layers": 1},
}
LONG = [pytest.mark.slow, pytest.mark.ci]


def storages(values: Any) -> list[torch.UntypedStorage]:
    """The memory of all tensors in nested values."""
    return [each.untyped_storage() for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


class Born(TorchDispatchMode):
    """Notes the memory of each tensor that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.born: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(out):
            if storage._cdata not in before:
                self.born[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    @property
    def live_bytes(self) -> int:
        """What of it is not freed."""
        gc.collect()
        return sum(size for reference, size in self.born.values() if not reference.expired())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_layers", [0, pytest.param(2, marks=LONG)])
@pytest.mark.parametrize("choice", [pytest.param(name, marks=() if name == "full" else LONG) for name in CHOICES])
def test_what_is_kept_is_what_a_graph_holds(choice: str, num_layers: int, model: str) -> None:
    """Within 3 %; the rest is masks, labels and losses."""
    shape = {"vocab_size": 997, "num_layers": 4, "hidden_size": 128, "num_heads": 4} | MODELS[model]
    again = CHOICES[choice] | ({"recompute_num_layers": num_layers} if choice != "none" else {})
    train = {"micro_batch_size": 2, "seq_length": 64, "global_batch_size": 2, "device": "cpu"} | again
    config = config_from({"model": shape, "train": train}, source="")
    engine = Engine(config, ProcessMesh(layout_of(config), 0, torch.device("cpu"), timeout_s=60))
    assert graph_bytes(engine) == pytest.approx(activation_bytes(config, 0), rel=0.03)


def graph_bytes(engine: Engine) -> int:
    """What the graph of a rank's forward pass holds."""
    engine.store.begin_step(0)
    batch = random_batch(engine)
    with Born() as born:
        loss = engine.chunks[0].forward(None, batch)
    engine.mesh.world.all_reduce(torch.zeros(1))  # no rank is left in an exchange, whose tensors it would keep
    require(loss.requires_grad, "the graph is there")
    return born.live_bytes


def share_held(rank: int, config: Config, *, network: Network) -> float:
    """What the graph of a rank's forward pass holds, over what is counted."""
    return graph_bytes(make_engine(rank, config, network=network)) / activation_bytes(config, 0)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("cuts_tokens", ["on", "off"])
@pytest.mark.parametrize("choice", ["none", "selective of mlp", "full that keeps attention"])
def test_a_rank_of_two_keeps_its_share(choice: str, cuts_tokens: str) -> None:
    shape = {"vocab_size": 998, "num_layers": 4, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2}
    train = {"micro_batch_size": 2, "seq_length": 64, "global_batch_size": 2, "device": "cpu"} | CHOICES[choice]
    tables = {"model": shape, "train": train, "parallel": {"tp": 2, "sequence_parallel": cuts_tokens}}
    config = config_from(tables, source="", world_size=2)
    assert run_threads(2, share_held, config) == [pytest.approx(1, rel=0.03)] * 2


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("method", ["ulysses", "allgather"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("choice", ["none", "selective of attention", "full that keeps attention"])
def test_a_rank_keeps_its_tokens(choice: str, model: str, method: str) -> None:
    shape = {"vocab_size": 998, "num_layers": 4, "hidden_size": 128, "num_heads": 4} | MODELS[model]
    train = {"micro_batch_size": 1, "seq_length": 256, "global_batch_size": 1, "device": "cpu"} | CHOICES[choice]
    config = config_from(
        {"model": shape, "train": train, "parallel": {"cp": 4, "cp_method": method}}, source="", world_size=4
    )
    assert run_threads(4, share_held, config) == [pytest.approx(1, rel=0.03)] * 4
