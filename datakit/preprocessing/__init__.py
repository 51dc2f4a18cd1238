"""Text files to a token store: work items, workers, sealing, resuming."""
