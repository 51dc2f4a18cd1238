"""Plan: what a run holds, sends and keeps, and how long its steps take, before any of its ranks is there."""
