"""One example for each public class of datakit, which the reference page shows beside it; run in an empty folder."""

# %%
import json
from pathlib import Path

import numpy as np

Path("corpus.txt").write_text("A token is a number that a tokenizer makes of some letters.\n" * 400)

# %% Recipe
from datakit import Recipe, preprocess, train_tokenizer

train_tokenizer(["corpus.txt"], "tok.json", vocab_size=300)
recipe = Recipe("tok.json", append_eod=True, txt_split="line")
summary = preprocess(["corpus.txt"], "store", recipe, num_workers=1)
print(summary.num_documents, "documents")

# %% Tokenizer
from datakit import Tokenizer, open_tokenizer

tokenizer: Tokenizer = open_tokenizer("tok.json")
[ids] = tokenizer.encode_batch(["A token"])
assert tokenizer.decode(ids) == "A token"

# %% TokenizerTraining
from datakit import TokenizerTraining

training = TokenizerTraining(vocab_size=300, special_tokens=("<|user|>",), max_bytes=1_000_000)  # of a sample
print(training.train(["corpus.txt"], "chat.json", report=print).num_documents)

# %% Encoder
from datakit import Encoder, choose_backend, open_encoder

choice = choose_backend("auto", "tok.json", tokenizer, ["A token is a number."])  # the fastest with the same ids
encoder: Encoder = open_encoder("tok.json", choice.backend, choice.terms)
print(choice.backend, encoder.encode_batch(["A token"]).tokens)

# %% TokenStore
from datakit import TokenStore

store = TokenStore.open("store")
print(store.num_documents, store.num_tokens, store.document(17)[:8])

# %% TokenShard
shard = store.shard(0)
print(shard.num_tokens, shard.document(0)[:8])  # views of the mapped file, not copies

# %% Origin
origin = store.origin(17)
print(f"{origin.path}, line {origin.line}, byte {origin.offset_bytes}")

# %% Packing
from datakit import Packing, pack

pack("store", seq_length=64, packing="best_fit")
packed = TokenStore.open("store", rows=Packing("best_fit", seq_length=64))
print(packed.num_rows(64), "rows, no document cut that fits into one")

url = Path("store").absolute().as_uri()  # or s3://bucket/store
remote = TokenStore.open(url, cache="cache", rows=Packing("best_fit", seq_length=64))
assert remote.fingerprint == packed.fingerprint

# %% PackedStore
from datakit import PackedStore

assert PackedStore.of("store", packing="best_fit", seq_length=64).fingerprint == packed.fingerprint

# %% RemoteStore
from datakit import RemoteStore

remote = RemoteStore.at(url, cache="cache")
assert (remote.document(17) == store.document(17)).all()

# %% PackedRemoteStore
from datakit import PackedRemoteStore

rows = PackedRemoteStore.packed_at(url, packing="best_fit", seq_length=64, cache="cache")
assert rows.num_rows(64) == packed.num_rows(64)

# %%
preprocess(["corpus.txt"], "code", recipe)

# %% Blend
from datakit import Blend

code = TokenStore.open("code")
blend = Blend([(store, 0.7), (code, 0.3)], seq_length=64, seed=1)
batch = blend.batch([0, 1, 1_000_000])  # any samples of the endless stream
print(batch.tokens.shape)

# %% BatchOptions
from datakit import BatchOptions

options = BatchOptions(reset_positions=True, document_bounds=True)
print(blend.batch([0], options).cu_seqlens)  # where documents begin among the 64 tokens

# %% HostBatch
from datakit import HostBatch

memory = np.empty(HostBatch.num_bytes((2, 4, 64)), np.uint8)  # pinned memory, say
tokens, labels, positions, loss_mask = HostBatch.split(memory, (2, 4, 64), np.int64, np.float32)
assert tokens.shape == (2, 4, 64)

# %% Loader
from datakit import Loader

with Loader(blend, micro_batch_size=4, num_microbatches=2, dp_rank=0, dp_size=1) as loader:
    batch = loader.next_step()  # tokens, labels, positions, loss_mask: [2, 4, 64] each
    print(batch.tokens.shape, loader.cursor)

# %% BatchSizes
from datakit import BatchSizes

sizes = BatchSizes(16, rampup=(8, 4, 100))  # as Megatron-LM's --rampup-batch-size 8 4 100
assert [sizes.at(sample) for sample in (0, 49, 50, 100, 101)] == [8, 8, 12, 16, 16]
with Loader(blend, 4, sizes) as growing:
    assert growing.shape == (2, 4, 64)
print(sizes.samples_after(0, 1_000), "samples in 1,000 steps")

# %% Cursor
from datakit import Cursor

saved = json.dumps(loader.cursor.to_json())  # all that a resume needs, less than 1 KB
cursor = Cursor.from_json(json.loads(saved))
with Loader(blend, 4, 1, dp_rank=1, dp_size=2, cursor=cursor) as loader:  # other ranks go on exactly
    assert loader.next_step().first_sample == 8

# %% Segment
from datakit import Segment

later = [Segment(from_sample=100, weights=(0.2, 0.8)), Segment(from_sample=200, skip=((200, 232),))]
curriculum = Blend([(store, 0.7), (code, 0.3)], seq_length=64, later=later)

# %% Mixture
from datakit import Mixture

mixture = Mixture([Segment(0, weights=(0.7, 0.3)), *later])
print(mixture.counts(1_000), mixture.weights_at(150))  # samples of each source, without reading any

# %% MegatronOrder
from datakit import MegatronOrder

order = MegatronOrder(num_samples=40, split=(0.9, 0.1))  # --train-samples 40 --split 90,10

# %% MegatronBlend
from datakit import MegatronBlend

megatron = MegatronBlend([store], seq_length=64, seed=1234, order=order)
print(megatron.batch([0]).tokens[0, :8])  # the same row that Megatron-LM reads first

# %% BlendConfig
from datakit import BlendConfig, StepConfig

steps = StepConfig(seq_length=64, seed=1)
valid = BlendConfig(stores=("store",)).open(steps, table="data.valid")

# %% LabelTags
from datakit import LabelTags

tags = LabelTags(valid)  # of the documents that labels are in: `datakit preprocess --tag NAME=GLOB`
print([tags.names[number] for number in tags.of([0])[0, :4]])

# %% StepConfig
print(StepConfig(train_steps=100, seq_length=64, global_batch_size=8).global_batch_size * 100, "samples")

# %% MixtureConfig
from datakit import MixtureConfig

change = MixtureConfig(from_step=50, weights={"store": 2.0})  # one [[data.mixture]] of a run's file

# %% StreamConfig
from datakit import StreamConfig

stream = StreamConfig(stores=("store",), mixture=(change,)).open(StepConfig(seq_length=64), table="data")
print(stream.batch([0]).tokens.shape)

# %% RunStream
from datakit import RunStream

Path("run.toml").write_text('[data]\nstores = ["store"]\n[train]\nseq_length = 64\n')
blend = RunStream.read("run.toml").open()  # the stream of a trainer's run, without the trainer

# %% StreamRecord
from datakit import StreamRecord

with Loader(blend, 4, 1) as loader:
    state = loader.state_dict()
record = StreamRecord.from_json(state["stream"])
print(record.differences(record, num_samples=100))  # none

# %% Recorded
from datakit import Recorded

Path("state.json").write_text(json.dumps(state))
recorded = Recorded.read("state.json")  # or a checkpoint's root.json
print(recorded.step, recorded.num_samples)
