"""From a rank's tensors to a committed step: staging, the writer process, the commit."""
