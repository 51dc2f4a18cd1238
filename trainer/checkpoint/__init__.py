"""A run's checkpoints: when it saves, what it resumes from, how a step comes back into an engine."""
