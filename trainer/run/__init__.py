"""A run from its first step to its last, and what is done with a trained model."""
