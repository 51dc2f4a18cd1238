"""One example for each public class of datakit.torch, as the reference page shows it; run in an empty folder."""

# %%
import torch
from torch.utils.data import DataLoader

from datakit import Blend, write_store

store = write_store("store", [[1, 2, 3, 4, 5, 6, 7, 0]] * 400, vocab_size=8, eod_id=0)
blend = Blend([(store, 1.0)], seq_length=32, seed=1)
model = torch.nn.Linear(8, 8)

# %% StreamDataset
from datakit.torch import StreamDataset

dataset = StreamDataset(blend, micro_batch_size=4, dp_rank=0, dp_size=1)
for batch, _ in zip(DataLoader(dataset, batch_size=None, num_workers=2), range(3)):
    print(batch["tokens"].shape, batch["cursor"]["num_samples"])  # tensors, and what a resume needs
dataset.load_state_dict(batch["cursor"])

# %% MapDataset
from datakit.torch import MapDataset

whole = MapDataset(blend, micro_batch_size=4, num_batches=16)  # a validation set: a number of items, in any order
print(len(whole), whole[3]["tokens"].shape)

# %% KeptCursor
from datakit.torch import KeptCursor

kept = KeptCursor(dataset)  # an object with a state_dict, for Accelerate or a Run of ckptkit.torch
for batch, _ in zip(DataLoader(dataset, batch_size=None), range(2)):
    kept.keep(batch)  # after the step
print(kept.state_dict())

# %% LightningCursor
import lightning.pytorch as pl

from datakit.torch import LightningCursor

trainer = pl.Trainer(max_steps=1000, callbacks=[LightningCursor(dataset)])

# %% HfTrainerCursor
from datakit.torch import HfTrainerCursor, StreamDataset

rows = StreamDataset(blend, micro_batch_size=4, format="transformers")
callbacks = [HfTrainerCursor(rows)]  # Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
