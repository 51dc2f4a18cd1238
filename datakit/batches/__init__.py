"""A batch: rows cut at the ends of shards, put into memory, and gathered."""
