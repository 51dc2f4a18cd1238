"""Conversion: which format the sources of `datakit convert` are in, and the program part that reads it."""

import os
from collections.abc import Sequence
from pathlib import Path

from datakit.foreign import datatrove, foreign_index, litdata, mosaic
from datakit.foreign.foreign_store import TOKEN_DTYPES, Choices
from datakit.foreign.megatron import from_megatron
from datakit.format.manifest import FILE_NAME
from datakit.store.token_store import TokenStore
from threefold.errors import UserError, listed, listing, quoted

_READERS = {"datatrove": datatrove.from_datatrove, "mds": mosaic.from_mds, "litdata": litdata.from_litdata}
_WITH_COLUMNS = ("mds", "litdata")


def convert_to_store(
    sources: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    choices: Choices,
    *,
    source_format: str | None = None,
    copy: bool = False,
) -> TokenStore:
    """Make a store of datasets of one format, `source_format` or what they are; UserError if they are of several."""
    kind = source_format or _common_format(sources)
    if choices.dtype is not None and choices.dtype not in TOKEN_DTYPES:
        raise UserError(
            f"{choices.dtype!r} is not a dtype of tokens: {', '.join(TOKEN_DTYPES)}",
            hint="choose one of these for raw bytes, else leave --dtype out",
        )
    if choices.column is not None and kind not in _WITH_COLUMNS:
        raise UserError(f"--column is for {' and '.join(_WITH_COLUMNS)}; the sources are {kind}", hint="leave it out")
    if kind == "megatron":
        if choices.dtype is not None or choices.documents != "auto":
            raise UserError("Megatron's indices say dtype and documents", hint="leave out --dtype and --documents")
        return from_megatron(sources, output, choices, copy=copy)
    if copy:
        raise UserError(f"--copy is for megatron; tokens of {kind} are written again", hint="leave it out")
    return _READERS[kind](sources, output, choices)


def detect(source: str | os.PathLike[str]) -> str:
    """Return the format of one source; UserError if it is of none that is known."""
    path = Path(source)
    prefix = os.fspath(path).removesuffix(".bin").removesuffix(".idx")
    if os.path.isfile(f"{prefix}.idx"):
        return "megatron"
    if path.suffix == datatrove.SUFFIX or (path.is_dir() and any(path.glob(f"*{datatrove.SUFFIX}"))):
        return "datatrove"
    index = foreign_index.index_of(path)
    if index.is_file():
        raw = foreign_index.ForeignIndex.read(index).raw
        if "shards" in raw or "chunks" in raw:
            return "mds" if "shards" in raw else "litdata"
    if (path / FILE_NAME).is_file():
        raise UserError(
            f"{path} is a token store already", hint=f"datakit convert {quoted(path)} --to megatron --output DIR"
        )
    raise UserError(
        f"{path} is not a dataset: neither PREFIX.bin and PREFIX.idx, nor .ds files, nor a folder with the index.json "
        "of MDS or litdata",
        hint=listing(path),
    )


def _common_format(sources: Sequence[str | os.PathLike[str]]) -> str:
    kinds = {os.fspath(source): detect(source) for source in sources}
    if len(set(kinds.values())) == 1:
        return next(iter(kinds.values()))
    lines = [f"{source}: {kind}" for source, kind in kinds.items()]
    raise UserError(
        f"the sources are of several formats:{listed(lines, most=len(lines))}", hint="convert each, then datakit merge"
    )
