"""Watch: a run as its metrics file shows it, on a terminal or as lines. Nothing of it imports torch."""
