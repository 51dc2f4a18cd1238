"""What a checkpoint is on storage: its root, its data files and their part indexes."""
