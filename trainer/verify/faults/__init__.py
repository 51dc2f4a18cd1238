"""Faults of a trainer, by name: how each is planted, on which small run, and which check must find it."""
