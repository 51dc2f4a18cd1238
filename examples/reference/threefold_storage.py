"""One example for each public class of threefold.storage, which the reference page shows beside it."""

# %% MemoryStorage
from threefold.storage.memory import MemoryStorage

memory = MemoryStorage()
memory.write("step-000000100/root.json", b"{}")

# %% Fault
from threefold import StorageError
from threefold.storage.fault import Fault

full = Fault(StorageError("no space left"), ("write",), "step-*/root.json", after=1)  # the first of them is written

# %% FaultStorage
from threefold.storage.fault import FaultStorage

faulty = FaultStorage(memory, full)
faulty.write("step-000000200/root.json", b"{}")
try:
    faulty.write("step-000000300/root.json", b"{}")
except StorageError as error:
    print(error)

# %% LoggingStorage
from threefold.storage.request_log import LoggingStorage

logged = LoggingStorage(memory, print)  # a line for each request
logged.read_ranges("step-000000100/root.json", [(0, 2)])

# %% DryRunStorage
from threefold.storage.dry_run import DryRunStorage

dry = DryRunStorage(memory)
dry.delete(["step-000000100/root.json"])
print(dry.changes)  # what would have been done
