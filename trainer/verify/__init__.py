"""What a configuration computes, compared with one process before it runs: ranks as threads, and the checks."""
