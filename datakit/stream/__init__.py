"""Stream: what training reads, blended and permuted batches that resume exactly."""
