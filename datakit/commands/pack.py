"""`datakit pack`: put the documents of a store into rows, as an index."""

from dataclasses import dataclass
from typing import Literal

from datakit.commands.shared import Reporting, default_workers
from threefold.options import argument, option


@dataclass(frozen=True, kw_only=True)
class Options(Reporting):
    """Options of `datakit pack`."""

    store: str = argument("STORE", "a store in a local folder")
    seq_length: int = option(..., "tokens a row", minimum=1, maximum=1 << 24, metavar="L")
    packing: Literal["best_fit", "pad"] = option(
        "best_fit", "best_fit: as few rows as fit together; pad: one document a row"
    )
    output: str | None = option(
        None, "folder of the index; a rerun makes it again; default: STORE/packing-PACKING-L", metavar="DIR"
    )
    workers: int = option(default_workers, "threads; the bytes are the same with any number", metavar="N", minimum=1)
    dry_run: bool = option(False, "count the rows, write nothing")


def run(options: Options) -> None:
    """Put the documents of a store into rows of L tokens, and seal an index that says which; no token is written again.
    A document longer than a row is cut into row-long pieces first, and no shorter one is cut. The stream reads the rows
    with data.packing. The bytes do not depend on the threads, and the same command makes what a kill left undone.
    """
    from datakit.rows.pack import pack

    folder, record = pack(
        options.store,
        seq_length=options.seq_length,
        packing=options.packing,
        output=options.output,
        num_workers=options.workers,
        dry_run=options.dry_run,
    )
    padding = record.num_padding / (record.num_rows * record.seq_length)
    size_bytes = sum(digest.size_bytes for digest in record.files.values())
    names = ("num_documents", "num_tokens", "num_rows", "num_pieces", "num_padding")
    would = "would be " if options.dry_run else ""
    options.show(
        {
            "path": str(folder),
            "packing": record.packing,
            "seq_length": record.seq_length,
            "dry_run": options.dry_run,
            **{name: getattr(record, name) for name in names},
            "padding": padding,
            "size_bytes": size_bytes,
            "fingerprint": record.fingerprint,
        },
        f"{folder}: {would}{record.num_rows:,} rows of {record.seq_length:,} tokens, {padding:.3%} padding, of "
        f"{record.num_documents:,} documents in {record.num_pieces:,} pieces; {size_bytes:,} bytes",
    )
