"""Packing: documents of a store put into rows of one length, as an index over its shards; no token is written again."""
