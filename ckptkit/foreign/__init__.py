"""Other programs' model folders, read as checkpoints: Hugging Face."""
