"""Token stores: opened, written, merged, archived."""
