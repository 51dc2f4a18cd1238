"""Text: the documents of files, local or behind URLs, one after the other and with their places."""
