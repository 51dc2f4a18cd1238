"""One example for each public class of threefold, which the reference page shows beside it; run in an empty folder."""

# %% Storage
from threefold import Storage, open_storage

storage: Storage = open_storage("run")  # or s3://bucket/run, or any fsspec URL
storage.write("notes.json", b"{}", if_absent=True)
[content] = storage.read_ranges("notes.json", [(0, 2)])

# %% UserError
from threefold import UserError

try:
    open_storage("s3:/bucket")
except UserError as error:
    print(error.message, error.hint, error.exit_code)  # one sentence, what to type next, 2

# %% StorageError
from threefold import StorageError

try:
    storage.read_ranges("missing", [(0, 2)])
except StorageError as error:
    print(error)

# %% CheckFailed
from threefold import CheckFailed

try:
    raise CheckFailed("3 of 1,000 tensors differ", hint="ckptkit diff A B --only 'optim.*'")
except UserError as error:  # it and StorageError are UserErrors, which are ValueErrors
    print(error.exit_code)
