"""Foreign: the tokenized datasets of other programs, read into stores without tokenizing again."""
