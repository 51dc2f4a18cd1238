"""The state of a PyTorch program as pieces and a tree of values, and back."""
