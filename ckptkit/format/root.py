"""Root: the manifest of one checkpoint, JSON for people; a checkpoint exists exactly when its root does.

Everything read is checked: format version, checksum, caps, and that no name leads out of the step's folder.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ckptkit.format.keys import MAX_STEP, MAX_WRITERS, PART_STEM, check_attempt, check_step
from ckptkit.format.part_index import MAX_DATA_BYTES, MAX_INDEX_BYTES
from ckptkit.format.saved import Saved
from ckptkit.format.tensor_rows import (
    check_number,
    check_tensor,
    check_text,
    check_ties,
    read_tensors,
    tensor_lines,
    to_json,
)
from ckptkit.io.blocks import xxh3_64
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import MAX_LAYERS, TensorInfo
from threefold.errors import CheckFailed, UserError
from threefold.installing import NEWER
from threefold.masking import masked

FORMAT, VERSION, READ_VERSIONS = "ckptkit", 2, (1, 2)
MAX_ROOT_BYTES = 256 << 20
ROOT_HEAD_BYTES = 1024  # hold the format, version, step and attempt of a root
_ATTEMPT_LINE = re.compile(rb'^"attempt": "([A-Za-z0-9][A-Za-z0-9_-]{0,127})",$', re.MULTILINE)
_CHECKSUM = re.compile(rb',\n"checksum": "([0-9a-f]{16})"\n}\n')


def attempt_of_head(head: bytes) -> str | None:
    """Return the attempt that the first bytes of a root name; None for a root whose fields stand in another order."""
    match = _ATTEMPT_LINE.search(head)
    return match[1].decode() if match else None


@dataclass(frozen=True, slots=True)
class Part:
    """One data file and its index: keys relative to the step's folder, sizes, and the index file's XXH3-64."""

    data: str
    data_bytes: int
    index: str
    index_bytes: int
    index_xxh3: int


@dataclass(frozen=True, slots=True)
class Share:
    """Which writers' files a root names where it names not all: `count` from `first` on, of `of` writers in all."""

    first: int
    count: int
    of: int

    def __str__(self) -> str:
        last = self.first + self.count - 1
        return f"writer{'s' if self.count > 1 else ''} {self.first}" + (f"-{last}" if self.count > 1 else "")


@dataclass(frozen=True, slots=True)
class Root:
    """What a checkpoint holds: the tensor table in global terms, the parts, and the saver's free metadata.

    `saved` is filled in by the writer that commits; None in the root of an older version.
    `share` is None where the parts make up all tensors; the root of one node of several has a share. `certificate`
    vouches for the values of the tensors, however they are cut: it is kept as it is, also by a reshard.
    """

    step: int
    attempt: str  # the folder of its files, below that of the step
    layout: ParallelLayout  # that it was saved under
    num_layers: int  # what pipeline stages are cut from
    tensors: Mapping[str, TensorInfo]  # all of them, by name
    parts: tuple[Part, ...]  # the files of all writers
    metadata: Mapping[str, Any]  # free JSON of the saver; its numbers are metrics
    saved: Saved | None = None  # how, where and when
    share: Share | None = None  # which writers, if not all
    certificate: Mapping[str, Any] | None = None  # the sums of the values of its tensors

    def check(self) -> None:
        """Raise UserError if a reader would refuse this root, before anything is saved."""
        try:
            check_step(self.step)
            check_number(self.num_layers, MAX_LAYERS, "num_layers ")
            check_attempt(self.attempt)
            if not isinstance(self.layout, ParallelLayout):
                raise ValueError(f"{self.layout!r} is not a ParallelLayout")
            for info in self.tensors.values():
                check_tensor(info)
            check_ties(self.tensors)
            if not isinstance(self.certificate, Mapping | None):
                raise TypeError(f"a certificate of {type(self.certificate).__name__} instead of a dict")
            to_json(self.certificate).encode()
        except UserError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"no reader would take this checkpoint: {error}") from None
        try:
            if not isinstance(self.metadata, Mapping):
                raise TypeError(f"{type(self.metadata).__name__} instead of a dict")
            to_json(plain_json(self.metadata)).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"the metadata of a save is not JSON: {error}") from None

    def to_bytes(self, max_bytes: int = MAX_ROOT_BYTES) -> bytes:
        """Return the manifest: one line a tensor and a part, a checksum of all that comes before it at the end."""
        head: dict[str, object] = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "attempt": check_attempt(self.attempt),
            "layout": self.layout.sizes,
            "num_layers": self.num_layers,
            "metadata": plain_json(self.metadata),
        }
        optional = {
            "saved": self.saved and self.saved.to_json(),
            "share": self.share and asdict(self.share),
            "certificate": self.certificate,
        }
        head |= {name: value for name, value in optional.items() if value is not None}
        fields = [f"{to_json(name)}: {to_json(value)}" for name, value in head.items()]
        parts = [to_json(_fields(part) | {"index_xxh3": f"{part.index_xxh3:016x}"}) for part in self.parts]
        fields += [f'"{name}": [\n{joined}\n]' for name, joined in (
            ("tensors", tensor_lines(self.tensors)), ("parts", ",\n".join(parts)))]  # fmt: skip
        body = ("{\n" + ",\n".join(fields)).encode()
        if len(body) > max_bytes - 64:
            text = f"the root of step {self.step} has {len(body):,} bytes, at most {max_bytes:,} can be read"
            raise UserError(text, hint="keep large values in tensors, not in the metadata")
        return body + f',\n"checksum": "{xxh3_64(body):016x}"\n}}\n'.encode()

    def check_whole(self, where: str) -> None:
        """Raise UserError if the parts are those of one node of several: no damage, and not the step either."""
        if self.share is not None and self.share.count < self.share.of:
            raise UserError(
                f"{where} holds one node's part of the step only, {self.share} of {self.share.of}",
                hint="give the URL of a slower tier of the run, which holds whole steps",
            )

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "Root":
        """Read a manifest; CheckFailed where it is damaged or impossible, UserError where it is of a newer format."""
        if len(data) > MAX_ROOT_BYTES:
            raise CheckFailed(f"{where} has {len(data)} bytes, more than a checkpoint's root may have")
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckFailed(f"{where} is not a checkpoint's root: {error}") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise CheckFailed(f"{where} is not a checkpoint's root")
        tail = _CHECKSUM.search(data, max(len(data) - 64, 0))
        if tail is None or tail.end() != len(data) or int(tail[1], 16) != xxh3_64(data[: tail.start()]):
            raise CheckFailed(f"{where} is damaged: its checksum differs")
        version = document.get("version")
        if version not in READ_VERSIONS:
            raise UserError(
                f"{where} has format version {version!r}, this program reads {' and '.join(map(str, READ_VERSIONS))}",
                hint=NEWER,
            )
        try:
            root = cls(
                step=check_number(document["step"], MAX_STEP),
                attempt=check_attempt(check_text(document["attempt"], 128)),
                layout=ParallelLayout(**document["layout"]),
                num_layers=check_number(document["num_layers"], MAX_LAYERS),
                tensors=read_tensors(document["tensors"], version),
                parts=tuple(_part(row, document["attempt"]) for row in document["parts"]),
                metadata=dict(document["metadata"]),
                saved=Saved.from_json(document["saved"]) if "saved" in document else None,
                share=_share(document.get("share")),
                certificate=dict(document["certificate"]) if "certificate" in document else None,
            )
            if len({key for part in root.parts for key in (part.data, part.index)}) != 2 * len(root.parts):
                raise ValueError("a file is listed twice")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckFailed(f"{where} is not a sound root: {error!r}") from None
        return root


def _fields(part: Part) -> dict[str, object]:
    """Return the fields of a part, without the copies that asdict makes."""
    return {name: getattr(part, name) for name in part.__dataclass_fields__}


def plain_json(value: Any) -> Any:
    """Return the same value of dicts and lists, null for numbers that JSON lacks: a diverged loss fails no save.

    Passwords of URLs in texts are masked: they are no part of a checkpoint.
    """
    match value:
        case Mapping():
            return {masked(str(key)): plain_json(item) for key, item in value.items()}
        case str():
            return masked(value)
        case list() | tuple():
            return [plain_json(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value


def _part(row: dict[str, Any], attempt: str) -> Part:
    for key, suffix in ((row["data"], "safetensors"), (row["index"], "index")):
        folder, _, file = check_text(key, 255).partition("/")
        if folder != attempt or not re.fullmatch(rf"{PART_STEM}\.{suffix}", file):
            raise ValueError(f"{key!r} is not a file of attempt {attempt}")
    return Part(
        row["data"], check_number(row["data_bytes"], MAX_DATA_BYTES), row["index"],
        check_number(row["index_bytes"], MAX_INDEX_BYTES), int(check_text(row["index_xxh3"], 16), 16),
    )  # fmt: skip


def _share(row: dict[str, Any] | None) -> Share | None:
    if row is None:
        return None
    share = Share(*(check_number(row[field], MAX_WRITERS) for field in ("first", "count", "of")))
    if not 0 < share.count <= share.of - share.first:
        raise ValueError(f"a share of {row!r}")
    return share
