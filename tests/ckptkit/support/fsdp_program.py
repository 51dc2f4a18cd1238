"""The program of torch_program.py under FSDP2 on GPUs, a process a GPU: python fsdp_program.py save|load URL.

Rank 0 prints the losses of the three steps after the save as JSON.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

from tests.ckptkit.support.torch_program import load_at, save_at


def main() -> None:
    verb, url = sys.argv[1:]
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    if verb == "save":
        losses = save_at(rank, "fsdp", url, 4, device="cuda")
    else:
        _, losses = load_at(rank, "fsdp", url, device="cuda")
    if rank == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
