"""The model: the table of its parameters, and the layers that a pipeline stage computes."""
