"""Formats of a token store and an archive: shards, manifest, origins, tags, bytes to objects and back; outputs."""
