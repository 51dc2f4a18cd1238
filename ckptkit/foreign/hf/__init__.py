"""Hugging Face's model folders: read as a step of a run, and written of one."""
