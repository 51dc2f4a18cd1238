"""Whole checkpoints read: verify, hash, diff, inspect, statistics of values."""
