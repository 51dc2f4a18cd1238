"""One example for each public class of trainer.ops, which the reference page shows beside it."""

# %%
import torch

# %% QkNorm
from trainer.ops.rope import QkNorm, rope, rope_turns

qkv_TC = torch.randn(6, (4 + 2 * 2) * 8)  # six tokens, four heads and two key/value heads of eight
turns_TH = rope_turns(torch.arange(6), head_size=8, theta=10_000.0, dtype=qkv_TC.dtype)
norm = QkNorm(torch.ones(8), torch.ones(8), eps=1e-6)
q_TNH, k_TKH, v_TKH = rope(qkv_TC, turns_TH, num_heads=4, num_kv_heads=2, norm=norm)

# %% VocabularyPart
from trainer.ops.cross_entropy import VocabularyPart, row_sums

logits_TV, labels_T = torch.randn(6, 16), torch.randint(0, 10, (6,))
highest_T, sums_T, label_logits_T = row_sums(logits_TV, labels_T, VocabularyPart(first_row=0, num_true_rows=10))
losses_T = sums_T.log() + highest_T - label_logits_T

# %% Interval
from trainer.ops.adamw import Interval

weight, gradient = torch.randn(64), torch.randn(64)
moments = torch.zeros(64), torch.zeros(64)
interval = Interval(gradient, *moments, master=weight, published=None, decays=True, row=0)

# %% IntervalTable
from trainer.config import OptimConfig
from trainer.ops.adamw import IntervalTable

optimizer = IntervalTable([interval])  # all parameters of a rank, walked by one call
optimizer.adamw(OptimConfig(lr=1e-3), 1e-3, step=0, factor=torch.ones(()), is_bad=torch.zeros(()))
