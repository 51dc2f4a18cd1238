"""One example for each public class of ckptkit.torch, as the reference page shows it; run in an empty folder."""

# %%
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

# %% Run
from ckptkit.torch import Run

model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters())
with Run("run") as run:  # or s3://bucket/run
    run.save(100, {"model": model, "optimizer": optimizer, "rng": True}, metrics={"val_loss": 2.1})
    run.wait()
    report = run.load({"model": model, "optimizer": optimizer, "rng": True})  # in place, every byte verified

# %% LoadReport
from ckptkit.torch import LoadReport

report: LoadReport
print(report.step, report.num_certified, "tensors compared with what was saved")

# %% DcpWriter
from ckptkit.torch import DcpWriter

state = {"model": model.state_dict(), "epoch": 3}
dcp.save(state, storage_writer=DcpWriter("dcp-run/step-000000010"))

# %% DcpReader
from ckptkit.torch import DcpReader

dcp.load(state, storage_reader=DcpReader("dcp-run"))  # the newest step of the run

# %% GroupExchange
from ckptkit.torch import GroupExchange

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun sets these
exchange = GroupExchange()
assert exchange.all_gather(b"mine") == [b"mine"]
dist.destroy_process_group()

# %% HfTrainerCallback
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ckptkit.torch import HfTrainerCallback

config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 8
arguments = TrainingArguments("hf-run", max_steps=2, save_steps=1, use_cpu=True, report_to=[])
callback = HfTrainerCallback("hf-run")
Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, callbacks=[callback]).train()

# %% LightningCheckpointIO
import lightning.pytorch as pl

from ckptkit.torch import LightningCheckpointIO

trainer = pl.Trainer(max_steps=2, plugins=[LightningCheckpointIO("pl-run")])
