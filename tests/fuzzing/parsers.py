"""Every parser of bytes that others may have made, with sound inputs for it; `python -m tests.fuzzing` tries them.

The inputs are made by this project's own writers, or by those of tests, and are small.
"""

from tests.fuzzing.of_checkpoints import CHECKPOINTS
from tests.fuzzing.of_converted import CONVERTED
from tests.fuzzing.of_folders import FOLDERS
from tests.fuzzing.of_stores import STORES
from tests.fuzzing.of_zarr import ZARR
from tools.fuzzing.fuzz import Parser

PARSERS: dict[str, Parser] = {parser.name: parser for parser in (*CHECKPOINTS, *STORES, *FOLDERS, *CONVERTED, *ZARR)}
