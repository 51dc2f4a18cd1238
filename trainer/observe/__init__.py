"""What a run reports of each step: metrics, and the arithmetic behind their rates."""
