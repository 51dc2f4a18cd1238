"""Reading and writing data files: block I/O on local files, ranges and uploads elsewhere."""
