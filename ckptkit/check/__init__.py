"""Whole checkpoints read: verify, hash, inspect."""
