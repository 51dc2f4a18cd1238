"""`ckptkit export`: make a folder of another program out of a checkpoint."""

from dataclasses import dataclass
from typing import Literal

from ckptkit.commands.shared import CKPT_HELP, Reporting, opened, print_written, shown_bytes
from threefold.errors import UserError
from threefold.options import argument, option

DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


@dataclass(frozen=True, kw_only=True)
class Options(Reporting):
    """Options of `ckptkit export`."""

    source: str = argument("CKPT", CKPT_HELP)
    target: str = argument("DST", "folder to make: a path or URL")
    to: Literal["hf", "dcp", "torch_dist", "tensorstore"] = option(
        "hf",
        "what to make: a Hugging Face model, what torch.distributed.checkpoint or megatron-core loads, or Zarr arrays",
    )
    like: str | None = option(
        None,
        "folder whose config.json and tokenizer to take; default: those the run was imported with",
        metavar="FOLDER",
    )
    max_shard_bytes: int = option(5_000_000_000, "bytes of tensors in a file", minimum=1, metavar="N")
    dtype: Literal["fp32", "fp16", "bf16"] | None = option(None, "round values to it; default: as the step has them")
    dry_run: bool = option(False, "check everything, say what would be written, write nothing")


def run(options: Options) -> None:
    """Write the parameters of a checkpoint of any layout as a folder that transformers opens: safetensors files,
    config.json, tokenizer, the values bit for bit unless --dtype rounds them. Or all of its tensors as one that
    torch.distributed.checkpoint loads, or as Zarr arrays for tensorstore. Nothing but this project is needed. The same
    command goes on with an export that was killed.
    """
    from ckptkit.foreign.hf.export import export_folder
    from threefold.storage import open_storage

    target = open_storage(options.target.removeprefix(f"{options.to}:"))
    like = None if options.like is None else open_storage(options.like)
    if options.to != "hf" and (options.like or options.dtype):
        raise UserError("--like and --dtype are for --to hf", hint="leave them out")
    with opened(options.source) as reader, shown_bytes() as progress:
        if options.to == "hf":
            done = export_folder(
                reader, target, like=like, max_shard_bytes=options.max_shard_bytes,
                dtype=None if options.dtype is None else DTYPES[options.dtype], progress=progress,
                dry_run=options.dry_run,
            )  # fmt: skip
        elif options.to == "tensorstore":
            from ckptkit.foreign.zarr.export import export_tensorstore

            done = export_tensorstore(reader, target, progress=progress, dry_run=options.dry_run)
        else:
            from ckptkit.foreign.dcp.export import export_dcp

            done = export_dcp(
                reader, target, kind=options.to, max_shard_bytes=options.max_shard_bytes, progress=progress,
                dry_run=options.dry_run,
            )  # fmt: skip
    print_written(done, is_there=not done.bytes_written, as_json=options.json)
