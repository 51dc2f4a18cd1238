"""`ckptkit reshard`: rewrite a checkpoint for another layout."""

import os
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from ckptkit.commands.shared import (
    CKPT_HELP,
    Reporting,
    for_each_step,
    opened,
    share_of_run,
    shown_bytes,
    whole_run,
)
from threefold.cli import log, print_json, print_line
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK, UserError
from threefold.options import argument, option

if TYPE_CHECKING:
    from ckptkit.format.root import Root
    from ckptkit.loading.chunk_source import RewriteSource
    from ckptkit.model.layout import ParallelLayout
    from ckptkit.rewrite.reshard import ReshardReport


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
    etp: int | None = option(
        None,
        "tensor-parallel size of experts: 1 cuts none by tp and lets --ep borrow those ranks; without it that of --tp",
        minimum=1, metavar="N", flags=["--expert-tensor-parallel-size"],
    )  # fmt: skip
    virtual: int = option(
        1, "stages that each pipeline rank of the output holds", minimum=1, metavar="N",
        flags=["--vpp", "--num-virtual-stages-per-pipeline-rank"],
    )  # fmt: skip
    from_layout: str | None = option(
        None,
        "refuse a source of another layout; written like tp8-pp4, axes left out may be any",
        flag="--from",
        metavar="LAYOUT",
    )
    map: str | None = option(
        None, "TOML file with rules: tensors to rename, drop, grow, layers to drop or repeat", metavar="FILE"
    )
    shard: str = option(
        "0/1",
        "write only share I of N, counted from 0; auto: as Slurm or torchrun numbers its processes",
        metavar="I/N",
    )
    all: bool = option(False, "rewrite all committed steps of a run, oldest first; each keeps its number")
    dry_run: bool = option(False, "check the layout, say what would be written, write nothing")


def run(options: Options) -> int:
    """Write a checkpoint as the ranks of another layout would have saved it. Axes left out become 1. Memory stays below
    1 GiB whatever the size of the tensors; needs neither torch nor a GPU. The same command goes on with one that was
    killed. On several machines each runs it with a --shard of its own, and the one that ends last commits.
    """
    from ckptkit.format.address import open_target
    from ckptkit.mapping.mapper import Mapper
    from ckptkit.mapping.source import MappedSource
    from ckptkit.model.layout import ParallelLayout
    from ckptkit.rewrite.reshard import UPLOAD_MEMORY_BYTES, reshard
    from ckptkit.rewrite.shard import Shard

    shard = Shard.parse(options.shard, os.environ)
    layout = ParallelLayout(**{field.name: getattr(options, field.name) for field in fields(ParallelLayout)})
    # the files of all tensor-parallel ranks are written side by side
    target, target_step = open_target(options.target, write_memory_bytes=UPLOAD_MEMORY_BYTES // layout.tp)
    reports: list[dict[str, object]] = []

    def act(source: "RewriteSource") -> None:
        if options.from_layout is not None:
            check_source_layout(options.from_layout, source.root.layout, source.url)
        warn_of_empty_stages(layout, source.root)
        mapper = None if options.map is None else Mapper(options.map, source)
        read = source if mapper is None else MappedSource(source, mapper)
        with shown_bytes() as progress:
            done = reshard(
                read, target, layout, step=target_step, shard=shard, progress=progress, dry_run=options.dry_run
            )
        reports.append(asdict(done) | ({} if mapper is None else {"map": asdict(mapper.report)}))
        if not options.json:
            for line in () if mapper is None else mapper.report.lines(with_names=done.dry_run):
                print_line(line)
            print_report(done, "" if options.all else share_of_run(options.source, "rewrites"))

    if options.all:
        whole = whole_run(options.source, "rewrites")
        if target_step is not None:
            raise UserError(f"each step keeps its number: {options.target} names one step", hint=f"into {target.url}")
        damaged = for_each_step(whole, act)
    else:
        damaged = []
        with opened(options.source) as reader:
            act(reader)
    if options.json:
        print_json(reports if options.all else reports[0])
    return EXIT_CHECK_FAILED if damaged else EXIT_OK


def warn_of_empty_stages(layout: "ParallelLayout", root: "Root") -> None:
    """Report a layout of more stages than the model has layers: such a checkpoint is sound, and no run trains on it."""
    stages = layout.pp * layout.virtual
    if stages > root.num_layers > 0:
        log(
            f"warning: {layout} has {stages} stages, and the model {root.num_layers} layers: "
            f"{stages - root.num_layers} stages hold none, and no run trains on that"
        )


def print_report(done: "ReshardReport", end: str) -> None:
    """Print what a reshard did, and of one with shards what each of them has to write; `end` ends its line."""
    if done.was_there:
        print_line(f"{done.url}: {done.target_layout} is there already, {done.num_files} files{end}")
        return
    of_shard = f"shard {done.shard}, " if done.shards[1:] else ""
    for number, (num_files, num_bytes) in enumerate(done.shards) if of_shard and done.dry_run else ():
        print_line(f"shard {number}/{len(done.shards)}: {num_files} files, {num_bytes:,} bytes")
    rate = done.bytes_written / max(done.seconds, 1e-9) / 1e6
    did = "would be written" if done.dry_run else f"in {done.seconds:.1f} s ({rate:,.0f} MB/s)"
    kept = f", {done.bytes_kept:,} were there" if done.bytes_kept else ""
    missing = f", {done.num_missing} files of other shards are not there yet" if done.num_missing else ""
    print_line(
        f"{done.url}: {done.source_layout} -> {done.target_layout}, {of_shard}{done.num_files} files, "
        f"{done.bytes_written:,} bytes {did}{kept}{missing}"
        + (", equal to what was saved" if done.certified else "")
        + (f", {done.num_certified:,} source tensors equal to what was saved" if done.num_certified else "")
        + end
    )


def check_source_layout(text: str, layout: "ParallelLayout", url: str) -> None:
    """Refuse a source whose layout is not the one the user named."""
    from ckptkit.model.layout import ParallelLayout

    named = ParallelLayout.named_sizes(text)
    if any(layout.sizes.get(axis, layout.tp) != size for axis, size in named.items()):  # etp may be left out: it is tp
        raise UserError(f"{url} was saved as {layout}, not as {text}", hint=f"--from {layout}")
