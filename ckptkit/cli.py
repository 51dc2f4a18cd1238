"""The `ckptkit` command; verbs on the steps of a run are in `run_verbs`. numpy is imported by verbs, not for --help."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ckptkit.run_verbs import add_run_verbs
from ckptkit.verb import add_verb, whole_number
from threefold.cli import Handler, Parser, print_json, print_line, report, run
from threefold.console import live
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK, CheckFailed, UserError

LINES_EVERY_S = 10.0  # of progress, where no terminal is
CKPT_HELP = "run URL (its newest committed step) or step URL: a path, s3://..., or any fsspec URL"


def build_parser() -> Parser:
    """The parser of all verbs."""
    parser = Parser(
        prog="ckptkit",
        description="Verified, resharding checkpoints on local disks, S3 and any fsspec URL.",
        epilog="S3 settings come from the standard AWS_* variables (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...). "
        "Exit codes: 0 ok, 1 check failed, 2 usage, 3 I/O, 130 or 143 ended by SIGINT or SIGTERM.",
    )
    verbs = parser.add_subparsers(metavar="{ls,best,pin,unpin,prune,inspect,verify,hash,copy,reshard}")
    add_run_verbs(verbs)

    inspect = add_verb(
        verbs,
        "inspect",
        inspect_verb,
        summary="what a checkpoint holds",
        description="Print what a checkpoint holds, from its root alone.",
    )
    inspect.add_argument("checkpoint", metavar="CKPT", help=CKPT_HELP)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")

    verify = add_verb(
        verbs,
        "verify",
        verify_verb,
        summary="check every byte of a checkpoint",
        description="Read every byte of a checkpoint (or a sample), check it against its checksums, and name the file, "
        "the offset and the tensors of all damage (then the exit code is 1).",
    )
    verify.add_argument("checkpoint", metavar="CKPT", help=CKPT_HELP)
    extent = verify.add_mutually_exclusive_group()
    extent.add_argument(
        "--sample",
        type=share,
        default=argparse.SUPPRESS,
        metavar="SHARE",
        help="read a random share of each data file only, 0.05 for a twentieth, its first and last 1 MiB included",
    )
    extent.add_argument(
        "--manifest", action="store_true", help="read root and indexes only, and look at the sizes of the data files"
    )
    verify.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="which sample")

    hash_ = add_verb(
        verbs,
        "hash",
        hash_verb,
        summary="hash a checkpoint's contents, whatever its layout",
        description="Print hashes of a checkpoint's tensors, the same for any layout it is stored in.",
    )
    hash_.add_argument("checkpoint", metavar="CKPT", help=CKPT_HELP)
    hash_.add_argument("--tensors", action="store_true", help="print the hash of every tensor too")

    copy = add_verb(
        verbs,
        "copy",
        copy_verb,
        summary="copy a checkpoint to another storage",
        description="Copy a committed step between any two storages, byte for byte, every byte verified on the way; "
        "the copy is committed last. The same command continues a copy that was killed.",
    )
    copy.add_argument("source", metavar="SRC", help=CKPT_HELP)
    copy.add_argument("target", metavar="DST", help="run URL; the step keeps its number")
    copy.add_argument("--all", action="store_true", help="copy all committed steps of a run, oldest first")
    copy.add_argument("--verify", action="store_true", help="read every byte of the copy back before it is committed")

    reshard = add_verb(
        verbs,
        "reshard",
        reshard_verb,
        summary="rewrite a checkpoint for another layout",
        description="Write a checkpoint as the ranks of another layout would have saved it. Axes left out become 1. "
        "Memory stays below 1 GiB whatever the size of the tensors; needs neither torch nor a GPU.",
    )
    reshard.add_argument("source", metavar="SRC", help=CKPT_HELP)
    reshard.add_argument("target", metavar="DST", help="run URL (the step keeps its number) or step URL")
    for name, long, what in (
        ("tp", "tensor-model-parallel-size", "tensor-parallel size of the output"),
        ("pp", "pipeline-model-parallel-size", "pipeline-parallel size of the output"),
        ("dp", "data-parallel-size", "data-parallel (ZeRO) cut of the output"),
    ):
        reshard.add_argument(f"--{name}", f"--{long}", type=whole_number(1), default=1, metavar="N", help=what)
    reshard.add_argument(
        "--from",
        dest="from_layout",
        metavar="LAYOUT",
        default=argparse.SUPPRESS,
        help="refuse a source of another layout; written like tp8-pp4, axes left out may be any",
    )
    return parser


def share(text: str) -> float:
    """The share of a file that is read."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0, up to 1")
    return value


def pointing_to_other_steps(verb: Handler) -> Handler:
    """A verb's decorator: where damage ends it, the hint says how to find another step."""

    def run_verb(arguments: argparse.Namespace) -> int | None:
        try:
            return verb(arguments)
        except CheckFailed as damage:
            from ckptkit.format.address import split_address

            run_url = split_address(getattr(arguments, "checkpoint", "") or arguments.source)[0]
            raise CheckFailed(damage.message, hint=damage.hint or f"ckptkit ls {run_url}") from damage

    return run_verb


@pointing_to_other_steps
def inspect_verb(arguments: argparse.Namespace) -> int:
    from ckptkit.check.inspect import describe
    from ckptkit.format.keys import step_folder
    from ckptkit.loading.roots import read_root
    from ckptkit.runs.catalogue import resolve

    storage, step = resolve(arguments.checkpoint)
    about = describe(read_root(storage, step), f"{storage.url}/{step_folder(step)}")
    if arguments.json:
        print_json(about)
        return EXIT_OK
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
    for row in about["tensors"] if arguments.tensors else ():
        print_line(f"{row['name']}  {row['dtype']} {row['shape']}  {row['placement']}")
    return EXIT_OK


@pointing_to_other_steps
def verify_verb(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ckptkit.check.verify import verify_checkpoint
    from ckptkit.io.blocks import return_large_frees
    from ckptkit.loading.reader import CheckpointReader
    from ckptkit.runs.catalogue import resolve

    return_large_frees()
    storage, step = resolve(arguments.checkpoint)
    with CheckpointReader(storage, step) as reader:
        read = 0.0 if arguments.manifest else getattr(arguments, "sample", 1.0)
        result = verify_checkpoint(reader, share=read, seed=arguments.seed)
    if arguments.json:
        print_json({"ok": result.ok, "url": reader.url} | asdict(result))
    else:
        for fault in result.faults:
            print_line(str(fault))
        print_line(
            f"{reader.url}: {result.num_files} files, {result.bytes_read:,} of {result.data_bytes:,} bytes read, "
            + ("no fault" if result.ok else f"{len(result.faults)} fault{'s' if len(result.faults) > 1 else ''}")
        )
    return EXIT_OK if result.ok else EXIT_CHECK_FAILED


@pointing_to_other_steps
def hash_verb(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ckptkit.check.hash import hash_checkpoint
    from ckptkit.io.blocks import return_large_frees
    from ckptkit.loading.reader import CheckpointReader
    from ckptkit.runs.catalogue import resolve

    return_large_frees()
    storage, step = resolve(arguments.checkpoint)
    with CheckpointReader(storage, step) as reader:
        found = hash_checkpoint(reader)
    if arguments.json:
        print_json({"url": reader.url, "step": step} | asdict(found))
        return EXIT_OK
    for name, digest in found.tensors.items() if arguments.tensors else ():
        print_line(f"{digest}  {name}")
    for total in ("params", "optim", "all"):
        print_line(f"{getattr(found, total)}  {total}")
    return EXIT_OK


@pointing_to_other_steps
def copy_verb(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ckptkit.format.address import open_address, split_address
    from ckptkit.io.blocks import return_large_frees
    from ckptkit.loading.reader import CheckpointReader
    from ckptkit.rewrite.copy import FILES_AT_ONCE, UPLOAD_MEMORY_BYTES, copy_step
    from ckptkit.runs.catalogue import committed_steps, resolve

    return_large_frees()
    source, step = resolve(arguments.source)
    steps = [step]
    if arguments.all:
        if split_address(arguments.source)[1] is not None:
            raise UserError(f"--all copies a run, {arguments.source} is one step", hint="leave --all out")
        steps = committed_steps(source)
    target, target_step = open_address(arguments.target, write_memory_bytes=UPLOAD_MEMORY_BYTES // FILES_AT_ONCE)
    if target_step not in (None, *steps) or (target_step is not None and arguments.all):
        raise UserError(f"a copy keeps its number: {arguments.target} is no place for it", hint=f"copy to {target.url}")
    reports, code = [], EXIT_OK
    for step in steps:
        try:
            with CheckpointReader(source, step) as reader, shown_bytes() as progress:
                done = copy_step(reader, target, verify=arguments.verify, progress=progress)
        except CheckFailed as damage:
            if not arguments.all:
                raise
            report(damage)  # the other steps are worth copying all the more
            code = damage.exit_code
            continue
        reports.append(asdict(done))
        if not arguments.json:
            print_line(
                f"{done.target}: {done.num_files} files, {done.bytes_copied:,} bytes copied in {done.seconds:.1f} s"
                + (f", {done.bytes_kept:,} were there" if done.bytes_kept else "")
            )
    if arguments.json:
        print_json(reports)
    return code


@pointing_to_other_steps
def reshard_verb(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ckptkit.format.address import open_address
    from ckptkit.io.blocks import return_large_frees
    from ckptkit.loading.reader import CheckpointReader
    from ckptkit.model.layout import ParallelLayout
    from ckptkit.rewrite.reshard import UPLOAD_MEMORY_BYTES, reshard
    from ckptkit.runs.catalogue import resolve

    return_large_frees()
    layout = ParallelLayout(tp=arguments.tp, dp=arguments.dp, pp=arguments.pp)
    storage, step = resolve(arguments.source)
    # the files of all tensor-parallel ranks are written side by side
    target, target_step = open_address(arguments.target, write_memory_bytes=UPLOAD_MEMORY_BYTES // layout.tp)
    with CheckpointReader(storage, step) as reader:
        if "from_layout" in arguments:
            check_source_layout(arguments.from_layout, reader.root.layout, reader.url)
        with shown_bytes() as progress:
            done = reshard(reader, target, layout, step=target_step, progress=progress)
    if arguments.json:
        print_json(asdict(done))
        return EXIT_OK
    if not done.bytes_written:
        print_line(f"{done.url}: {done.target_layout} is there already, {done.num_files} files")
        return EXIT_OK
    rate = done.bytes_written / max(done.seconds, 1e-9) / 1e6
    print_line(
        f"{done.url}: {done.source_layout} -> {done.target_layout}, {done.num_files} files, "
        f"{done.bytes_written:,} bytes in {done.seconds:.1f} s ({rate:,.0f} MB/s)"
    )
    return EXIT_OK


def check_source_layout(text: str, found: object, url: str) -> None:
    """Refuse a source whose layout is not the one the user named."""
    from dataclasses import fields

    from ckptkit.model.layout import ParallelLayout

    named = ParallelLayout.parse(text)
    axes = [field.name for field in fields(named) if any(word.startswith(field.name) for word in text.split("-"))]
    if any(getattr(named, axis) != getattr(found, axis) for axis in axes):
        raise UserError(f"{url} was saved as {found}, not as {text}", hint=f"--from {found}")


@contextmanager
def shown_bytes() -> Iterator[Callable[[int, int], None]]:
    """Show how many bytes of how many are done, as the function that is handed out is told."""
    with live(lines_every_s=LINES_EVERY_S) as shown:
        yield lambda done, total: shown.show(f"{done:,} of {total:,} bytes", done / max(total, 1))


def main(argv: Sequence[str] | None = None) -> int:
    return run(build_parser(), argv)
