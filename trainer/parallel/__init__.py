"""Computation that is cut over ranks: the collectives of tensor parallelism and what is built of them."""
