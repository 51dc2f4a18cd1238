"""Token stores: shards, manifest, origins, tags; written, opened and merged."""
