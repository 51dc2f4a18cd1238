"""Saves and loads by megatron-core's dist_checkpointing on ranks of gloo, with the CPU in place of its GPU."""

from typing import Any

LAYERS, ROWS, COLUMNS = 4, 6, 10


def _patched() -> Any:
    import torch

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    if not torch.distributed.is_initialized():  # one rank
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from megatron.core import dist_checkpointing

    return dist_checkpointing


def state(rank: int, size: int, *, is_empty: bool = False) -> dict[str, Any]:
    """A model's and an optimizer's state: rows and columns cut over ranks, layers stacked, replicas, objects."""
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    def cut(name: str, whole: Any, dim: int, **options: Any) -> Any:
        part = torch.chunk(whole, size, dim)[rank].clone()
        data = torch.zeros_like(part) if is_empty else part
        return ShardedTensor.from_rank_offsets(name, data, (dim, rank, size), replica_id=0, **options)

    generator = torch.Generator().manual_seed(0)
    loaded: dict[str, Any] = {}
    for kind, dtype in (("model", torch.bfloat16), ("optimizer.exp_avg", torch.float32)):
        row, column = (torch.randn(ROWS * 2, COLUMNS, generator=generator).to(dtype) for _ in range(2))
        loaded[f"{kind}.row"] = cut(f"{kind}.row", row, 0)
        loaded[f"{kind}.column"] = cut(f"{kind}.column", column, 1)
        for layer in range(LAYERS):
            whole = torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)
            data = torch.zeros_like(whole) if is_empty else whole
            loaded[f"{kind}.{layer}"] = ShardedTensor.from_rank_offsets(
                f"{kind}.layers", data, (0, layer, LAYERS), prepend_axis_num=1, replica_id=rank
            )
    loaded["rng"] = ShardedObject("rng", None if is_empty else {"rank": rank}, (size,), (rank,), 0)
    return loaded if is_empty else loaded | {"iteration": 7, "args": {"lr": 0.1}}


def save(rank: int, folder: str, size: int) -> None:
    """Save the state."""
    _patched().save(state(rank, size), folder)


def load(rank: int, folder: str, size: int) -> list[Any]:
    """Return what each tensor of the state is equal to, and what is common."""
    import torch

    empty, full = state(rank, size, is_empty=True), state(rank, size)
    if size != 2:  # the random states were those of two ranks
        empty.pop("rng")
    found = _patched().load(empty, folder)
    equal = [
        name for name, each in found.items() if isinstance(each, torch.Tensor) and torch.equal(each, full[name].data)
    ]
    return [sorted(equal), found["iteration"], found["args"], found.get("rng")]
