"""Exact deduplication: the first of all documents of equal text is kept."""
