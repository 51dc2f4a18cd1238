"""Folders of torch.distributed.checkpoint and torch_dist: read as a step of a run, and written of one."""
