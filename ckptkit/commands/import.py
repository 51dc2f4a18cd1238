"""`ckptkit import`: make a step of a run out of a folder of another program."""

from dataclasses import dataclass
from typing import Literal

from ckptkit.commands.shared import Reporting, print_written, shown_bytes
from threefold.errors import UserError
from threefold.options import argument, option

SourceFormat = Literal["hf", "safetensors", "dcp", "torch_dist", "torch_checkpointing", "ucp", "tensorstore"]


@dataclass(frozen=True, kw_only=True)
class Options(Reporting):
    """Options of `ckptkit import`."""

    source: str = argument("SRC", "folder of the other program: a path or URL")
    target: str = argument("RUN", "run URL (the step is 0) or step URL")
    source_format: SourceFormat = option(
        "hf",
        "what the source is: a Hugging Face model, any safetensors files, a save of torch.distributed.checkpoint, of "
        "megatron-core or of torch_checkpointing, a universal checkpoint of DeepSpeed, or Zarr arrays, for which the "
        "package tensorstore is needed",
        flag="--from",
    )
    family: Literal["generic"] | None = option(
        None,
        "generic takes the tensors of any Hugging Face folder by their own names, as --from safetensors does; default: "
        "the trainer's names, by the model_type in config.json",
    )
    allow_missing_chunks: bool = option(
        False, "read chunks of Zarr arrays that are not there as fill values, as programs leave such chunks out"
    )
    dry_run: bool = option(False, "check everything but the values, say what would be written, write nothing")


def run(options: Options) -> None:
    """Write a folder as a committed step, the values bit for bit: of a Hugging Face model the tensors, under the
    trainer's names or their own, config.json and tokenizer; of torch.distributed.checkpoint the tensors, whole, and
    what it pickled as bytes; of megatron-core's torch_dist the files beside it too; of torch_checkpointing the whole
    state, for ckptkit.torch.Run; of DeepSpeed's universal checkpoints weights and optimizer states; of Zarr arrays each
    as a tensor. Nothing is unpickled; neither torch nor transformers is needed. The same command repeats an import that
    was killed.
    """
    from ckptkit.foreign.folder import import_folder
    from ckptkit.foreign.kinds import folder_of
    from ckptkit.format.address import foreign_kind, open_target
    from ckptkit.io.blocks import return_large_frees

    return_large_frees()
    if (kind := foreign_kind(options.source) or options.source_format) != options.source_format:
        raise UserError(f"{options.source!r} is not of --from {options.source_format}", hint=f"--from {kind}")
    target, step = open_target(options.target)
    if options.family is None:
        folder = folder_of(kind, options.source)
    elif kind in ("hf", "safetensors"):
        folder = folder_of("safetensors", options.source.removeprefix("hf:"))
    else:
        text = f"--family {options.family} is of Hugging Face's folders, not of --from {kind}"
        raise UserError(text, hint="leave it out")
    if options.allow_missing_chunks:
        if options.source_format != "tensorstore":
            text = f"--allow-missing-chunks is of Zarr arrays, not of --from {options.source_format}"
            raise UserError(text, hint="leave it out, or --from tensorstore")
        folder.allows_missing_chunks = True
    with shown_bytes() as progress:
        done = import_folder(folder, target, step=step or 0, progress=progress, dry_run=options.dry_run)
    print_written(done, is_there=done.was_there, as_json=options.json)
