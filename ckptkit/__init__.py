"""ckptkit: asynchronous, verified, resharding checkpoints on POSIX, Lustre and object storage."""

from importlib import import_module

_PUBLIC = {
    "Box": "chunk",
    "Checkpointer": "saving.checkpointer",
    "CheckpointerOptions": "saving.checkpointer_options",
    "CheckpointReader": "loading.reader",
    "Coords": "layout",
    "Exchange": "loading.exchange",
    "NodeExchange": "loading.node_exchange",
    "ParallelLayout": "layout",
    "Piece": "chunk",
    "Placement": "placement",
    "Retention": "runs.retention",
    "Root": "format.root",
    "SaveReport": "saving.save_report",
    "TensorInfo": "tensor",
    "committed_steps": "runs.catalogue",
    "copy_step": "passes.copying",
    "hash_checkpoint": "passes.hashing",
    "latest_step": "runs.catalogue",
    "pin": "runs.pins",
    "prune": "runs.pruning",
    "reshard": "passes.reshard",
    "resolve": "runs.catalogue",
    "restore": "loading.restore",
    "save": "saving.save",
    "restore_newest": "loading.fallback",
    "unpin": "runs.pins",
    "verify_checkpoint": "passes.verify",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> object:
    """Import a public name at its first use, so that no part of ckptkit pays for another."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
