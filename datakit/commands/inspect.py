"""`datakit inspect`: say what a store or archive holds."""

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from datakit.commands.shared import OfStored, counts_text
from threefold.cli import print_json, print_line
from threefold.console import has_colours, print_table
from threefold.errors import UserError, quoted
from threefold.options import option

if TYPE_CHECKING:
    from datakit.reports.excerpt import Excerpt
    from datakit.tokenization.tokenizer import Tokenizer

_COLOURS, _PLAIN = ("\x1b[30;46m", "\x1b[30;43m"), "\x1b[0m"
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


@dataclass(frozen=True, kw_only=True)
class Options(OfStored):
    """Options of `datakit inspect`."""

    document: int | None = option(None, "show this document, counted from 0", metavar="K", exclusive="excerpt")
    sample: int | None = option(
        None, "show row K, tokens [K L, K L + L], L from --seq-length", metavar="K", exclusive="excerpt"
    )
    seq_length: int | None = option(None, "tokens of a sample", metavar="L")
    packing: Literal["concat", "best_fit", "pad"] = option(
        "concat", "how the sample's row is made: as `datakit pack` packed the store, or cut out of its tokens"
    )
    index: str | None = option(None, "the folder of the packing index, if it is not in the store", metavar="DIR")
    tokenizer: str | None = option(
        None, "the tokenizer that made the store, if the store keeps no copy: shows text, not ids", metavar="FILE",
        exclusive="shown",
    )  # fmt: skip
    any_tokenizer: bool = option(False, "take --tokenizer though another made the store")
    ids: bool = option(False, "show the ids of tokens, not their text", exclusive="shown")


def run(options: Options) -> None:
    """Say what a token store or an archive holds, or show one of a store's documents or samples and where it came
    from.
    """
    from datakit.format.manifest import is_plain_folder
    from datakit.shards.store_source import StoreSource
    from datakit.store.token_store import TokenStore

    place = options.store
    if asks_for_excerpt(options):
        if not is_plain_folder(place):
            raise UserError(
                f"{place} is not a store in a local folder: its documents and samples cannot be shown",
                hint=f"datakit unarchive {quoted(place)} --output STORE",
            )
        inspect_excerpt(options)
        return
    if is_plain_folder(place):
        store = TokenStore.open(place)
        path, manifest, record = str(store.path), store.manifest, None
    else:
        source = StoreSource.open(place)
        path, manifest, record = source.storage.url, source.manifest, source.record
    if options.json:
        names = ("num_documents", "num_tokens", "dtype", "fingerprint")
        sizes = record and {name: getattr(record, name) for name in ("level", "frame_bytes", "packed_bytes")}
        print_json(
            {
                "path": path,
                **{name: getattr(manifest, name) for name in names},
                "tokenizer": asdict(manifest.tokenizer),
                "tokenizer_files": {name: asdict(digest) for name, digest in manifest.tokenizer_files.items()},
                "settings": manifest.settings,
                "skipped": manifest.skipped,
                "shards": [asdict(shard) for shard in manifest.shards],
                **({"archive": sizes} if sizes else {}),
            }
        )
        return
    tokenizer = manifest.tokenizer
    print_line(f"{path}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens, {manifest.dtype}")
    lines = {
        "archive": record and f"{record.packed_bytes / 1e6:,.1f} MB, zstd level {record.level}",
        "fingerprint": manifest.fingerprint,
        "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint}",
        "end token": f"{tokenizer.eod_token!r} = {tokenizer.eod_id}",
        "kept copy": ", ".join(manifest.tokenizer_files) or None,
        "settings": ", ".join(f"{name}={value}" for name, value in manifest.settings.items()),
        "skipped": counts_text(manifest.skipped) or None,
        "shards": len(manifest.shards),
    }
    for name, value in lines.items():
        if value is not None:
            print_line(f"{name:<12} {value}")
    rows = [(shard.name, f"{shard.num_documents:,}", f"{shard.num_tokens:,}") for shard in manifest.shards]
    print_table(("shard", "documents", "tokens"), rows, left={"shard"})


def asks_for_excerpt(options: Options) -> bool:
    """Return whether `inspect` is to show a document or sample; UserError if its flags do not fit each other."""
    hint = "--sample 0 --seq-length 4096" + " in place of --document" * (options.document is not None)
    if (options.sample is None) != (options.seq_length is None):
        raise UserError("--sample and --seq-length go together", hint=hint)
    if options.sample is None and (options.packing != "concat" or options.index):
        raise UserError("--packing and --index are of a --sample", hint=hint)
    if options.index and options.packing == "concat":
        raise UserError(f"--index {options.index} is of packed rows", hint="--packing best_fit")
    asks = options.document is not None or options.sample is not None
    if (options.tokenizer or options.ids) and not asks:
        flag = "--tokenizer" if options.tokenizer else "--ids"
        raise UserError(f"{flag} shows one document or sample", hint="--document 0")
    return asks


def inspect_excerpt(options: Options) -> None:
    """Show the tokens of one document or sample, as text if its tokenizer is there, and where they came from."""
    from datakit.reports.excerpt import document_excerpt, open_matching_tokenizer, sample_excerpt
    from datakit.rows.packed_rows import Packing
    from datakit.store.token_store import TokenStore

    length = options.seq_length or 0
    rows = None if options.packing == "concat" else Packing(options.packing, length, options.index)
    store = TokenStore.open(options.store, rows=rows)
    if options.document is not None:
        name, excerpt = "document", document_excerpt(store, options.document)
    else:
        name, excerpt = "sample", sample_excerpt(store, options.sample or 0, length)
    is_any = options.any_tokenizer
    tokenizer = None if options.ids else open_matching_tokenizer(store, options.tokenizer, is_any=is_any)
    if not options.json:
        _print_excerpt(excerpt, tokenizer)
        return
    print_json(
        {
            "store": str(store.path),
            name: getattr(options, name),
            "first_token": excerpt.first_token,
            "ids": excerpt.tokens.tolist(),
            "text": tokenizer.decode(excerpt.tokens) if tokenizer else None,
            "sources": [
                {
                    "document": part.document,
                    "start": part.start,
                    "num_tokens": part.num_tokens,
                    **asdict(part.origin),
                    "tag": part.tag,
                }
                for part in excerpt.parts
            ],
        },
        masks=False,
    )


def _print_excerpt(excerpt: "Excerpt", tokenizer: "Tokenizer | None") -> None:
    from datakit.reports.excerpt import pieces

    for part, ids in excerpt.part_tokens():
        origin = part.origin
        print_line(
            f"document {part.document:,}, tokens {part.start:,} to {part.start + part.num_tokens:,}: "
            f"{origin.path or 'no source'}, line {origin.line:,}, byte {origin.offset_bytes:,}"
            + (f", tag {part.tag}" if part.tag else "")
        )
        if tokenizer is None:
            print(*ids.tolist())
        elif not sys.stdout.isatty():
            print(tokenizer.decode(ids))
        else:
            shown = (piece.translate(_CONTROLS) for piece in pieces(tokenizer, ids) if piece)
            *colours, plain = (*_COLOURS, _PLAIN) if has_colours(sys.stdout) else ("", "", "")
            print("".join(f"{colours[i % 2]}{piece}{plain}" for i, piece in enumerate(shown)))
