"""ckptkit: asynchronous, verified, resharding checkpoints on POSIX, Lustre and object storage."""

from importlib import import_module

# `ckptkit.restore.restore` and `ckptkit.reshard.reshard` share their module's name and are imported from there.
_PUBLIC = {
    "Box": "chunk",
    "Checkpointer": "checkpointer",
    "CheckpointerOptions": "checkpointer",
    "CheckpointReader": "reader",
    "Coords": "layout",
    "ParallelLayout": "layout",
    "Piece": "chunk",
    "Placement": "placement",
    "Root": "root",
    "SaveReport": "checkpointer",
    "TensorInfo": "tensor",
    "committed_steps": "catalogue",
    "hash_checkpoint": "hashing",
    "latest_step": "catalogue",
    "resolve": "catalogue",
    "verify_checkpoint": "verify",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> object:
    """Import a public name at its first use, so that no part of ckptkit pays for another."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
