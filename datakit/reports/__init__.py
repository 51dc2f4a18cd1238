"""What a store holds and whether it is whole: verify, stats, diff, excerpts, the HTML page."""
