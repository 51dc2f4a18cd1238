"""From a committed step to a rank's tensors: planned, verified reads."""
