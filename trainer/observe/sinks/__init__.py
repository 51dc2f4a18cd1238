"""Sinks: where the lines of a run go besides its metrics file, each in a process of its own that imports no torch."""
