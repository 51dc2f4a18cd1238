"""`ckptkit import`: make a step of a run out of a Hugging Face folder."""

from dataclasses import dataclass
from typing import Literal

from ckptkit.commands.shared import Reporting, print_written, shown_bytes
from threefold.options import argument, option


@dataclass(frozen=True, kw_only=True)
class Options(Reporting):
    """Options of `ckptkit import`."""

    source: str = argument("SRC", "folder with config.json and model.safetensors (or shards): a path or URL")
    target: str = argument("RUN", "run URL (the step is 0) or step URL")
    source_format: Literal["hf"] = option("hf", "what the source is", flag="--from")
    dry_run: bool = option(False, "check everything but the values, say what would be written, write nothing")


def run(options: Options) -> None:
    """Write the tensors, config.json and tokenizer of a Hugging Face model as a committed step, under the trainer's
    names, the values bit for bit. Neither torch nor transformers is needed. The same command repeats an import that was
    killed.
    """
    from ckptkit.foreign.hf_folder import HfFolder
    from ckptkit.format.address import open_address
    from ckptkit.io.blocks import return_large_frees
    from ckptkit.rewrite.hf_import import import_folder

    return_large_frees()
    target, step = open_address(options.target)
    with shown_bytes() as progress:
        done = import_folder(
            HfFolder(options.source), target, step=step or 0, progress=progress, dry_run=options.dry_run
        )
    print_written(done, is_there=done.was_there, as_json=options.json)
