"""ckptkit: asynchronous, verified, resharding checkpoints on POSIX, Lustre and object storage."""
