"""The steps of a run: which there are and which are kept."""
