"""Folders that torch_checkpointing saved, read as a step of a run."""
