"""Universal checkpoints of DeepSpeed, read as a step of a run."""
