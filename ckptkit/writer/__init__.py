"""The writer process, `python -m ckptkit.writer`: writes a step's files, commits, copies, prunes. No torch."""
