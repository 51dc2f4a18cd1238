"""trainer: a compact tensor x pipeline x data parallel GPT trainer."""

from importlib import import_module

# `trainer.train.train` shares its module's name and is imported from there.
_PUBLIC = {
    "Batch": "engine",
    "Config": "config",
    "Engine": "engine",
    "ProcessMesh": "mesh",
    "Ranks": "ranks",
    "StepStats": "engine",
    "TrainedModel": "trained",
    "evaluate_checkpoint": "evaluate",
    "generate_text": "generate",
    "gpipe": "schedule",
    "load_config": "config_file",
    "one_f_one_b": "schedule",
    "open_checkpoint": "trained",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> object:
    """Import a public name at its first use, so that --help does not pay for torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
