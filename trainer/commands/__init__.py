"""The verbs of the `trainer` command, a file each, in the order of the help. torch is imported by verbs alone."""

VERBS = ("train", "launch", "watch", "eval", "generate", "schedule", "verify", "explain", "plan", "bench")
