"""Files of `torch.save`: zips and pickled data, parsed without running anything, and written."""
