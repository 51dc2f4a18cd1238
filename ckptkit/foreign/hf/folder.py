"""A folder as `transformers` saves it, with the face of a run of one step: `hf:FOLDER`, on any storage.

The folder has no checksums, so its bytes are read unverified.
"""

from collections.abc import Collection
from functools import cached_property

from ckptkit.foreign.folder import ForeignFolder
from ckptkit.foreign.folder_source import FolderFiles, FolderSource
from ckptkit.foreign.hf.contents import FILES, Contents, read_contents
from ckptkit.foreign.hf.model_table import Row
from ckptkit.foreign.hf.parts import HfParts
from ckptkit.format.root import Root
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.placement import Placement
from ckptkit.model.tensor import TensorInfo
from ckptkit.runs.run import Run


class HfFolder(ForeignFolder):
    """One model folder, with the methods of a Run that holds one step, 0; nothing is read before the first of them."""

    scheme = "hf:"

    @cached_property
    def contents(self) -> Contents:
        """Return what the folder holds; CheckFailed or UserError if it is not whole or not of a known kind."""
        return read_contents(self.storage)

    def open(self, step: int, exchange: object = None) -> FolderSource:
        """Return a reader, for a `with`; the ranks of an exchange read each for itself."""
        contents, root = self.contents, self.root(step)
        files = FolderFiles(self.storage, {**contents.weights, **contents.files})
        return FolderSource(root, self.url, files, HfParts(contents, root, files))

    def root(self, step: int, exchange: object = None) -> Root:
        """Return the root that a run has whose step this folder is."""
        contents = self.contents
        infos = [_info(row, contents) for row in contents.rows if not row.expert]
        infos += [TensorInfo(FILES + name, "U8", (size,), Placement("first")) for name, size in contents.files.items()]
        tensors = {info.name: info for info in infos}
        return Root(step, self.attempt, ParallelLayout(), contents.num_layers, tensors, (), dict(contents.metadata))

    @property
    def files(self) -> Collection[str]:
        """The files that are read."""
        return {*self.contents.weights, *self.contents.files}


def open_source(url: str) -> Run | HfFolder:
    """Return what an address means: a model folder for `hf:FOLDER`, else a run."""
    return HfFolder(url) if HfFolder.is_meant(url) else Run(url)


def _info(row: Row, contents: Contents) -> TensorInfo:
    name = row.foreign
    if row.placement.tied_to is not None:
        name = next(each.foreign for each in contents.rows if each.name == row.placement.tied_to)
    return TensorInfo(row.name, contents.tensors[name].dtype, row.shape, row.placement)
