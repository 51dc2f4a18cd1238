"""trainer: a compact tensor x pipeline x data parallel GPT trainer."""
