"""DcpState: what a root records of a state of torch.distributed.checkpoint (DCP), beside its tensors; no torch.

Under `dcp` in the root's metadata: `version`; `paths`, for each name where its value is in the nested state, a list of
keys and numbers, null if the state is flat; `bytes`, the tensors of bytes that are pickled values of DCP's, opaque
here; `dtypes`, torch's dtype of tensors that are stored as bytes with a dim more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from threefold.errors import CheckFailed, UserError
from threefold.installing import NEWER

METADATA, VERSION = "dcp", 1
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class DcpState:
    """Where values are in the nested state, and which tensors are not what they look like."""

    paths: Mapping[str, Path] | None = None
    blobs: frozenset[str] = frozenset()
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what the root's metadata holds under `dcp`."""
        paths = None if self.paths is None else {name: list(path) for name, path in self.paths.items()}
        return {"version": VERSION, "paths": paths, "bytes": sorted(self.blobs), "dtypes": dict(self.dtypes)}

    @classmethod
    def of(cls, metadata: Mapping[str, Any], where: str) -> "DcpState | None":
        """Return what a root's metadata says, None if it is not of such a state."""
        described = metadata.get(METADATA)
        if described is None:
            return None
        try:
            if described["version"] != VERSION:
                text = f"{where} has a DCP state of version {described['version']!r}, this program reads {VERSION}"
                raise UserError(text, hint=NEWER)
            paths, dtypes = described["paths"], described["dtypes"]
            found = None if paths is None else {str(name): checked_path(path) for name, path in paths.items()}
            return cls(found, frozenset(map(str, described["bytes"])), {str(k): str(v) for k, v in dtypes.items()})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckFailed(f"{where} does not describe a sound DCP state: {error!r}") from None


def checked_path(path: Any) -> Path:
    """Return a path of keys and numbers; ValueError for anything else."""
    made = tuple(path)
    if not made or not all(type(key) in (str, int) for key in made):
        raise ValueError("a path that is not of names and numbers")
    return made
