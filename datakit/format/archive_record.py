"""ArchiveRecord: what an archive holds; `archive.json`, which is written last and makes the files an archive.

The names here and the fields of `archive.json` are explained in docs/formats/archive.md. Every field is checked on
reading; a fault is a CheckFailed that names file and field.
"""

from dataclasses import asdict, dataclass

from datakit.files.durable import FileDigest
from datakit.format.fields import Fields
from datakit.format.manifest import ARCHIVE_NAME, WORK_FOLDER, digest_in, encoded_record, require_record
from datakit.format.seekable_zstd import DAMAGE_HINT, MAX_FRAME_BYTES

PLAN_KEY = f"{WORK_FOLDER}/{ARCHIVE_NAME}"  # there while an archive is unfinished
SUFFIX = ".zst"
FORMAT = "threefold-archive"
VERSION = 1
MAX_RECORD_BYTES = 512 << 20


class _RecordFields(Fields):
    hint = DAMAGE_HINT


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """What an archive holds: how it was compressed, its store's manifest, and its compressed files by name."""

    level: int
    frame_bytes: int
    manifest: FileDigest
    files: dict[str, FileDigest]

    @property
    def packed_bytes(self) -> int:
        """Bytes of all compressed files."""
        return sum(digest.size_bytes for digest in self.files.values())

    def encode(self) -> bytes:
        """Return the content of `archive.json`."""
        files = [{"name": name, **asdict(digest)} for name, digest in self.files.items()]
        return encoded_record(FORMAT, VERSION, asdict(self) | {"files": files})

    @classmethod
    def parse(cls, place: str, data: bytes) -> "ArchiveRecord":
        """Check the content of the `archive.json` at `place`."""
        fields = _RecordFields.parse(place, data)
        require_record(fields, FORMAT, VERSION, "an archive's record")
        frame_bytes = fields.number("frame_bytes")
        if not 0 < frame_bytes <= MAX_FRAME_BYTES:
            raise fields.fault(f"frames of {frame_bytes} bytes, at most {MAX_FRAME_BYTES} expected")
        files = {entry.text("name"): digest_in(entry) for entry in fields.tables("files")}
        return cls(fields.number("level"), frame_bytes, digest_in(fields.table("manifest")), files)
