"""Folders of Zarr arrays: read as a step of a run by tensorstore, and written of one by nothing but this project."""
