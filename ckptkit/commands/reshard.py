"""`ckptkit reshard`: rewrite a checkpoint for another layout."""

from dataclasses import asdict, dataclass, fields

from ckptkit.commands.shared import CKPT_HELP, Reporting, opened, shown_bytes
from threefold.cli import print_json, print_line
from threefold.errors import UserError
from threefold.options import argument, option


@dataclass(frozen=True, kw_only=True)
class Options(Reporting):
    """Options of `ckptkit reshard`."""

    source: str = argument("SRC", CKPT_HELP)
    target: str = argument("DST", "run URL (the step keeps its number) or step URL")
    tp: int = option(
        1, "tensor-parallel size of the output", minimum=1, metavar="N", flags=["--tensor-model-parallel-size"]
    )
    pp: int = option(
        1, "pipeline-parallel size of the output", minimum=1, metavar="N", flags=["--pipeline-model-parallel-size"]
    )
    dp: int = option(
        1, "data-parallel (ZeRO) cut of the output", minimum=1, metavar="N", flags=["--data-parallel-size"]
    )
    cp: int = option(
        1, "context-parallel size of the output", minimum=1, metavar="N", flags=["--context-parallel-size"]
    )
    ep: int = option(
        1, "expert-parallel size of the output", minimum=1, metavar="N", flags=["--expert-model-parallel-size"]
    )
    virtual: int = option(1, "stages that each pipeline rank of the output holds", minimum=1, metavar="N")
    from_layout: str | None = option(
        None,
        "refuse a source of another layout; written like tp8-pp4, axes left out may be any",
        flag="--from",
        metavar="LAYOUT",
    )
    dry_run: bool = option(False, "check the layout, say what would be written, write nothing")


def run(options: Options) -> None:
    """Write a checkpoint as the ranks of another layout would have saved it. Axes left out become 1. Memory stays below
    1 GiB whatever the size of the tensors; needs neither torch nor a GPU.
    """
    from ckptkit.format.address import open_address
    from ckptkit.model.layout import ParallelLayout
    from ckptkit.rewrite.reshard import UPLOAD_MEMORY_BYTES, reshard

    layout = ParallelLayout(options.tp, options.cp, options.ep, options.dp, options.pp, options.virtual)
    # the files of all tensor-parallel ranks are written side by side
    target, target_step = open_address(options.target, write_memory_bytes=UPLOAD_MEMORY_BYTES // layout.tp)
    with opened(options.source) as reader:
        if options.from_layout is not None:
            check_source_layout(options.from_layout, reader.root.layout, reader.url)
        with shown_bytes() as progress:
            done = reshard(reader, target, layout, step=target_step, progress=progress, dry_run=options.dry_run)
    if options.json:
        print_json(asdict(done))
        return
    if not done.bytes_written:
        print_line(f"{done.url}: {done.target_layout} is there already, {done.num_files} files")
        return
    rate = done.bytes_written / max(done.seconds, 1e-9) / 1e6
    did = "would be written" if done.dry_run else f"in {done.seconds:.1f} s ({rate:,.0f} MB/s)"
    print_line(
        f"{done.url}: {done.source_layout} -> {done.target_layout}, {done.num_files} files, "
        f"{done.bytes_written:,} bytes {did}"
    )


def check_source_layout(text: str, found: object, url: str) -> None:
    """Refuse a source whose layout is not the one the user named."""
    from ckptkit.model.layout import ParallelLayout

    named = ParallelLayout.parse(text)
    axes = [field.name for field in fields(named) if any(word.startswith(field.name) for word in text.split("-"))]
    if any(getattr(named, axis) != getattr(found, axis) for axis in axes):
        raise UserError(f"{url} was saved as {found}, not as {text}", hint=f"--from {found}")
