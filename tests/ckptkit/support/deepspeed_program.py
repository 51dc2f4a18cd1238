"""Train three steps by DeepSpeed with ZeRO on some ranks, and make a universal checkpoint of that: STAGE FOLDER.

DeepSpeed builds a library at its first use, and waits without end if a build was killed once. It is not needed here.
"""

import argparse
import os
import sys


def main(stage: int, folder: str) -> None:
    import deepspeed
    import torch
    from deepspeed.checkpoint import ds_to_universal

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    class Scale(torch.nn.Module):
        """A buffer of four numbers, which the input is multiplied with."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.arange(4.0))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * self.scale.to(value.dtype)

    frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4), Scale(), frozen)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    settings = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    engine.save_checkpoint(folder, tag="step")
    if torch.distributed.get_rank():
        return
    torch.save(engine.module.state_dict(), f"{folder}/weights.pt")
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=f"{folder}/step", output_folder=f"{folder}/universal", num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=False, inject_missing_state=True,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    os._exit(0)  # its threads may not end
