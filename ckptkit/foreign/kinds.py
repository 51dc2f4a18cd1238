"""Kinds: the other programs whose folders are read, by the word that an address or `--from` begins with.

The modules that parse pickled data are loaded for their own kinds alone.
"""

from importlib import import_module

from ckptkit.foreign.folder import ForeignFolder
from ckptkit.format.address import foreign_kind

FOLDERS = {
    "dcp": "dcp.folder:DcpFolder",
    "hf": "hf.folder:HfFolder",
    "safetensors": "hf.folder:SafetensorsFolder",
    "tensorstore": "zarr.folder:TensorstoreFolder",
    "torch_checkpointing": "torch_checkpointing.folder:TorchCheckpointingFolder",
    "torch_dist": "dcp.folder:TorchDistFolder",
    "ucp": "deepspeed.folder:UcpFolder",
}


def folder_of(kind: str, url: str) -> ForeignFolder:
    """Return a folder of some kind."""
    module, _, name = FOLDERS[kind].partition(":")
    made: ForeignFolder = getattr(import_module(f"ckptkit.foreign.{module}"), name)(url)
    return made


def meant(url: str) -> ForeignFolder | None:
    """Return the folder that an address such as `dcp:FOLDER` means, None if it means a run."""
    kind = foreign_kind(url)
    return None if kind is None else folder_of(kind, url)
