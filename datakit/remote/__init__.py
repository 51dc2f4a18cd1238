"""Token stores behind URLs, read through a bounded local cache."""
