"""Whole checkpoints written again: copy and reshard."""
