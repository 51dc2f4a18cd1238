"""`ckptkit inspect`: what a checkpoint holds."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptkit.commands.shared import OfCheckpoint, OfTensors, opened, shown_bytes
from threefold.cli import log, print_json, print_line
from threefold.console import print_table
from threefold.options import option

if TYPE_CHECKING:
    from ckptkit.check.stats import TensorStatistics
    from ckptkit.loading.chunk_source import ChunkSource

STATISTICS = ("tensor", "dtype", "shape", "elements", "NaN", "Inf", "zeros", "min", "max", "mean", "std", "L2 norm")


@dataclass(frozen=True, kw_only=True)
class Options(OfCheckpoint, OfTensors):
    """Options of `ckptkit inspect`."""

    tensors: bool = option(False, "list every tensor")
    stats: bool = option(False, "read all values: NaN, Inf, zeros, range, mean, deviation and norm of every tensor")
    html: str | None = option(
        None, "write the statistics as a page, with histograms; needs threefold[plot]", metavar="FILE"
    )


def run(options: Options) -> None:
    """Print what a checkpoint holds, from its root alone; with --stats or --html also what its values are like."""
    from ckptkit.check.inspect import describe
    from ckptkit.check.slabs import chosen

    if options.html:
        check_page(options.html)
    with opened(options.source) as reader:
        [table] = chosen([reader.root], options.only)
        about = describe(reader.root, reader.url)
        about["tensors"] = [row for row in about["tensors"] if row["name"] in table]
        described = statistics(reader, about, options) if options.stats or options.html else {}
    if options.json:
        for row in about["tensors"] if described else ():
            row["stats"] = described[row["name"]].to_json() if row["name"] in described else None
        print_json(about)
        return
    print_facts(about)
    for row in about["tensors"] if options.tensors else ():
        print_line(f"{row['name']}  {row['dtype']} {row['shape']}  {row['placement']}")
    if options.stats:
        from ckptkit.check.stats import cells

        rows = [row for row in about["tensors"] if row["name"] in described]
        lines = [(row["name"], row["dtype"], str(row["shape"]), *cells(described[row["name"]])) for row in rows]
        print_table(STATISTICS, lines, left=STATISTICS[:3])


def print_facts(about: dict[str, Any]) -> None:
    """Print what a checkpoint holds, but its tensors."""
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in about["dtypes"].items())
    tensors = f"{about['num_tensors']:,} ({dtypes}), {about['num_elements']:,} elements"
    facts = {
        "step": f"{about['step']:,}",
        "layout": f"{about['layout']}, {about['num_layers']} layers",
        "tensors": f"{tensors}, {about['tensor_bytes']:,} bytes",
        "files": f"{about['num_files']:,}, {about['file_bytes']:,} bytes, attempt {about['attempt']}",
    }
    if about["share"]:
        facts["share"] = f"one node's files only: {about['share']}"
    recorded = {key: str(value) for key, value in ((about["saved"] or {}) | about["metadata"]).items()}
    cut = ((key, text if len(text) <= 100 else text[:97] + "...") for key, text in recorded.items())
    print_line(about["url"])
    for key, text in (*facts.items(), *cut):
        print_line(f"  {key:<10} {text}")


def check_page(path: str) -> None:
    """Refuse a page that cannot be made or written, before anything is read for it."""
    from threefold.packages import require
    from threefold.page import check_page_path

    require("jinja2", "a page")
    check_page_path(path)


def statistics(reader: "ChunkSource", about: dict[str, Any], options: Options) -> "dict[str, TensorStatistics]":
    """Return the statistics of the chosen tensors; write them as a page too, if one is asked for."""
    from ckptkit.check.stats import render_statistics, tensor_statistics
    from ckptkit.io.blocks import keep_small_frees
    from threefold.page import write_page

    keep_small_frees()
    with shown_bytes() as progress:
        found = tensor_statistics(reader, only=options.only, progress=progress)
    if options.html:
        write_page(render_statistics(about, found), options.html)
        log(f"wrote {options.html}")
    return found
