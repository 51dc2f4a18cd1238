"""Whole checkpoints written anew: copy and reshard."""
