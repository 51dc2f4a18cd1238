"""Where the bytes of shards are: mapped files, open files, or a bounded local cache of what is behind a URL."""
