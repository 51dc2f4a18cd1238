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
from ckptkit.io.blocks import xxh3_64
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.placement import Placement
from ckptkit.model.tensor import ITEMSIZE, MAX_DIMS, MAX_LAYERS, MAX_NAME_BYTES, MAX_NUMEL, TensorInfo
from threefold.errors import CheckFailed, UserError
from threefold.masking import masked

FORMAT, VERSION = "ckptkit", 1
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
    `share` is None where the parts make up all tensors; the root of one node of several has a share.
    """

    step: int
    attempt: str
    layout: ParallelLayout
    num_layers: int
    tensors: Mapping[str, TensorInfo]
    parts: tuple[Part, ...]
    metadata: Mapping[str, Any]
    saved: Saved | None = None
    share: Share | None = None

    def check(self) -> None:
        """Raise UserError if a reader would refuse this root, before anything is saved."""
        try:
            check_step(self.step)
            _whole(self.num_layers, MAX_LAYERS, "num_layers ")
            check_attempt(self.attempt)
            if not isinstance(self.layout, ParallelLayout):
                raise ValueError(f"{self.layout!r} is not a ParallelLayout")
            for info in self.tensors.values():
                _check_tensor(info)
            _check_ties(self.tensors)
        except UserError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"no reader would take this checkpoint: {error}") from None
        try:
            if not isinstance(self.metadata, Mapping):
                raise TypeError(f"{type(self.metadata).__name__} instead of a dict")
            _json(plain_json(self.metadata)).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"the metadata of a save is not JSON: {error}") from None

    def to_bytes(self) -> bytes:
        """Return the manifest: one line a tensor and a part, a checksum of all that comes before it at the end."""
        head: dict[str, object] = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "attempt": check_attempt(self.attempt),
            "layout": asdict(self.layout),
            "num_layers": self.num_layers,
            "metadata": plain_json(self.metadata),
        }
        if self.saved is not None:
            head["saved"] = self.saved.to_json()
        if self.share is not None:
            head["share"] = asdict(self.share)
        fields = [f"{_json(name)}: {_json(value)}" for name, value in head.items()]
        rest: dict[object, str] = {}  # a row after the name, of which many tensors share one
        tensors = []
        for t in self.tensors.values():
            key = (t.dtype, tuple(t.shape), t.placement)
            if key not in rest:
                rest[key] = _json({"dtype": t.dtype, "shape": t.shape, "placement": _fields(t.placement)})[1:]
            tensors.append(f'{{"name": {_json(t.name)}, {rest[key]}')
        parts = [_json(_fields(part) | {"index_xxh3": f"{part.index_xxh3:016x}"}) for part in self.parts]
        fields += [f'"{name}": [\n{joined}\n]' for name, joined in (
            ("tensors", ",\n".join(tensors)), ("parts", ",\n".join(parts)))]  # fmt: skip
        body = ("{\n" + ",\n".join(fields)).encode()
        if len(body) > MAX_ROOT_BYTES - 64:
            text = f"the root of step {self.step} has {len(body):,} bytes, at most {MAX_ROOT_BYTES:,} can be read"
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
        if document.get("version") != VERSION:
            raise UserError(
                f"{where} has format version {document.get('version')!r}, this program reads {VERSION}",
                hint="pip install -U threefold",
            )
        try:
            root = cls(
                step=_whole(document["step"], MAX_STEP),
                attempt=check_attempt(_text(document["attempt"], 128)),
                layout=ParallelLayout(**document["layout"]),
                num_layers=_whole(document["num_layers"], MAX_LAYERS),
                tensors={row["name"]: _tensor(row) for row in document["tensors"]},
                parts=tuple(_part(row, document["attempt"]) for row in document["parts"]),
                metadata=dict(document["metadata"]),
                saved=Saved.from_json(document["saved"]) if "saved" in document else None,
                share=_share(document.get("share")),
            )
            if len(root.tensors) != len(document["tensors"]):
                raise ValueError("a tensor is listed twice")
            if len({key for part in root.parts for key in (part.data, part.index)}) != 2 * len(root.parts):
                raise ValueError("a file is listed twice")
            _check_ties(root.tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckFailed(f"{where} is not a sound root: {error!r}") from None
        return root


_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def _fields(value: Placement | Part) -> dict[str, object]:
    """Return the fields of a flat dataclass, without the copies that asdict makes."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def plain_json(value: Any) -> Any:
    """Return the same value of dicts and lists, null for numbers that JSON lacks: a diverged loss fails no save.

    Passwords of URLs in texts are masked: they are no part of a checkpoint.
    """
    if isinstance(value, Mapping):
        return {masked(str(key)): plain_json(item) for key, item in value.items()}
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _whole(value: object, limit: int, what: str = "") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        raise ValueError(f"{what}{value!r} is not a whole number up to {limit}")
    return value


def _text(value: object, max_bytes: int) -> str:
    if not isinstance(value, str) or not 0 < len(value.encode()) <= max_bytes:
        raise ValueError(f"{value!r} is not a text of 1 to {max_bytes} bytes")
    return value


def _tensor(row: dict[str, Any]) -> TensorInfo:
    info = TensorInfo(row["name"], row["dtype"], tuple(row["shape"]), Placement(**row["placement"]))
    _check_tensor(info)
    return info


def _check_tensor(info: TensorInfo) -> None:
    name, shape, placement = _text(info.name, MAX_NAME_BYTES), info.shape, info.placement
    if info.dtype not in ITEMSIZE or len(shape) > MAX_DIMS:
        raise ValueError(f"{name}: dtype {info.dtype!r}, shape {shape!r}")
    for size in shape:
        _whole(size, MAX_NUMEL, f"{name}: size ")
    stage, dim = placement.stage, placement.dim
    if stage not in ("first", "last"):
        _whole(stage, MAX_LAYERS, f"{name}: stage ")
    if dim is not None:
        _whole(dim, MAX_DIMS, f"{name}: dim ")
    if info.numel > MAX_NUMEL or (dim is not None and dim >= len(shape)):
        raise ValueError(f"{name}: shape {shape!r}, cut along {dim}")
    if placement.tied_to is not None:
        _text(placement.tied_to, MAX_NAME_BYTES)
    if placement.axis not in ("tp", "ep") or not isinstance(placement.padded, bool):
        raise ValueError(f"{name}: {placement!r}")


def _part(row: dict[str, Any], attempt: str) -> Part:
    for key, suffix in ((row["data"], "safetensors"), (row["index"], "index")):
        folder, _, file = _text(key, 255).partition("/")
        if folder != attempt or not re.fullmatch(rf"{PART_STEM}\.{suffix}", file):
            raise ValueError(f"{key!r} is not a file of attempt {attempt}")
    return Part(
        row["data"], _whole(row["data_bytes"], MAX_DATA_BYTES), row["index"],
        _whole(row["index_bytes"], MAX_INDEX_BYTES), int(_text(row["index_xxh3"], 16), 16),
    )  # fmt: skip


def _share(row: dict[str, Any] | None) -> Share | None:
    if row is None:
        return None
    share = Share(*(_whole(row[field], MAX_WRITERS) for field in ("first", "count", "of")))
    if not 0 < share.count <= share.of - share.first:
        raise ValueError(f"a share of {row!r}")
    return share


def _check_ties(tensors: Mapping[str, TensorInfo]) -> None:
    for info in tensors.values():
        if info.placement.tied_to is None:
            continue
        target = tensors.get(info.placement.tied_to)
        if target is None or target.placement.tied_to or (target.dtype, target.shape) != (info.dtype, info.shape):
            raise ValueError(f"{info.name} is tied to {info.placement.tied_to!r}")
