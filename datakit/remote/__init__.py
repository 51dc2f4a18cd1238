"""Places of names in pickles of older releases."""
