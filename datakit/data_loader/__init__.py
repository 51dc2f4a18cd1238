"""Datasets for PyTorch's DataLoader, and their place in the loops of others; datakit.torch is the door."""
