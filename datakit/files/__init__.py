"""Files of this machine, written durably, and objects behind URLs, read as files."""
