"""`ckptkit inspect`: what a checkpoint holds."""

from dataclasses import dataclass

from ckptkit.commands.shared import OfCheckpoint, opened
from threefold.cli import print_json, print_line
from threefold.options import option


@dataclass(frozen=True, kw_only=True)
class Options(OfCheckpoint):
    """Options of `ckptkit inspect`."""

    tensors: bool = option(False, "list every tensor")


def run(options: Options) -> None:
    """Print what a checkpoint holds, from its root alone."""
    from ckptkit.check.inspect import describe

    with opened(options.source) as reader:
        about = describe(reader.root, reader.url)
    if options.json:
        print_json(about)
        return
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
    for row in about["tensors"] if options.tensors else ():
        print_line(f"{row['name']}  {row['dtype']} {row['shape']}  {row['placement']}")
