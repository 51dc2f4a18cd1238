"""Kinds: the other programs whose folders are read, by the word that an address or `--from` begins with.

The modules that parse pickled data are loaded for their own kinds alone.
"""

from importlib import import_module

from ckptkit.foreign.folder import ForeignFolder

KINDS = {
    "hf": "hf_folder.HfFolder",
    "dcp": "dcp_folder.DcpFolder",
    "torch_dist": "torch_dist_folder.TorchDistFolder",
    "torch_checkpointing": "torch_checkpointing_folder.TorchCheckpointingFolder",
    "ucp": "ucp_folder.UcpFolder",
    "tensorstore": "tensorstore_folder.TensorstoreFolder",
}


def folder_of(kind: str, url: str) -> ForeignFolder:
    """Return a folder of some kind."""
    module, _, name = KINDS[kind].partition(".")
    made: ForeignFolder = getattr(import_module(f"ckptkit.foreign.{module}"), name)(url)
    return made


def meant(url: str) -> ForeignFolder | None:
    """Return the folder that an address such as `dcp:FOLDER` means, None if it means a run."""
    kind = url.partition(":")[0]
    return folder_of(kind, url) if kind in KINDS and not url.startswith(f"{kind}://") else None
