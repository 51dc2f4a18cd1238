"""Passes over a whole checkpoint: inspect, verify, hash, reshard."""
