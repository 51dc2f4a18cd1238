"""One example for each public class of trainer, which the reference page shows beside it; run in an empty folder."""

# %%
import json
from pathlib import Path

import torch

from ckptkit import ParallelLayout
from datakit import open_tokenizer, write_store

documents = [[1, 2, 3, 4, 5, 6, 7, 0]] * 400
write_store("store", documents, vocab_size=8, eod_id=0)
write_store("valid", documents, vocab_size=8, eod_id=0)
Path("run.toml").write_text("""
[model]
num_layers = 2
hidden_size = 32
num_heads = 4
vocab_size = 8
[data]
stores = ["store"]
[data.valid]
stores = ["valid"]
num_samples = 4
[train]
train_steps = 4
seq_length = 16
global_batch_size = 2
device = "cpu"
[checkpoint]
save = "run"
""")

# %% Config
from trainer import Config, load_config

config: Config = load_config("run.toml")  # all faults of the file are one UserError
print(config.model.num_layers, config.train.global_batch_size)

# %%
from trainer import train

assert train(config) == 0

# %% ProcessMesh
from trainer import ProcessMesh

mesh = ProcessMesh(ParallelLayout(), rank=0, device=torch.device("cpu"), timeout_s=60.0)
print(mesh.coords)

# %% Engine
from trainer import Engine

engine = Engine(config, mesh)
engine.initialise()

# %% Batch
from trainer import Batch

tokens = torch.randint(0, 8, (2, 1, 17))  # two micro-batches of one row
batch = Batch(
    tokens=tokens[..., :-1], labels=tokens[..., 1:], positions=torch.arange(16).expand(2, 1, 16),
    loss_mask=torch.ones(2, 1, 16), first_sample=0,
)  # fmt: skip

# %% StepStats
from trainer import StepStats

stats: StepStats = engine.train_step(0, batch)
print(f"loss {stats.loss:.3f}, gradient norm {stats.grad_norm:.3f}, {stats.num_tokens} tokens")

# %% Ranks
from trainer import Ranks

ranks = Ranks("cpu", timeout_s=60.0)  # one process, or all that torchrun started
values = ranks.gather(ranks.rank)  # of every rank, on all ranks
ranks.say(f"{len(values)} ranks are there")  # once

# %% TrainedModel
from trainer import TrainedModel, open_checkpoint

checkpoint = open_checkpoint("run", None, {}, world_size=1)
model = TrainedModel(checkpoint, ranks)
print(model.engine.config.model.hidden_size)

# %% Sampling
from trainer import Sampling

sampling = Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=7)

# %% Until
from trainer import Until

until = Until(8, texts=("\n\n", "END"))  # 8 tokens, or before one of the texts

# %% Generation
from trainer import Generation

words = {f"w{number}": number for number in range(8)}
tokens = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
Path("tok.json").write_text(json.dumps({"pre_tokenizer": {"type": "Whitespace"}, "model": tokens, "added_tokens": []}))
generation = Generation(checkpoint, ranks, open_tokenizer("tok.json"))  # without one it is that of the run's stores
prompts = [generation.encode(text) for text in ("w1 w2 w3", "w4")]

# %% Piece
from trainer import Piece

pieces: list[Piece] = list(generation.stream(prompts, until, sampling))
print("".join(piece.text for piece in pieces if piece.prompt == 0), pieces[-1].finish)
