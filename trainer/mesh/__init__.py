"""Groups of ranks: which a layout needs, this rank's own, and the collectives that all of the trainer goes through."""
