"""The page of other programs' names: each flag and key that the tables know, with what it is here."""

from collections.abc import Sequence

from tools.site.markdown import block, code, plain, table
from trainer.config.foreign.table import PROGRAMS, Entry, Meaning, entries

INTRO = """\
---
hide: [toc]
---

# Names of other programs

Flags of these programs may be typed to `trainer train` as they are, and keys of torchtitan may be in its file. What
exists here is taken. What does not ends the command: all of it is answered at once, in the words of this page.
[From Megatron-LM](guides/from-megatron.md) shows how. `*` is any text. Flags that have one name in both, such as
`--seq-length` and `--lr`, are among [the keys](configuration.md).
"""
TITLES = {"deepspeed": "DeepSpeed: keys of its JSON"}
FUNCTIONS = {
    "train_samples": "`train.train_steps`, by the global batch",
    "train_tokens": "`train.train_steps`, by the global batch",
    "lr_decay_samples": "`optim.decay_steps`, by the global batch",
    "lr_decay_tokens": "`optim.decay_steps`, by the global batch",
    "lr_warmup_samples": "`optim.warmup_steps`, by the global batch",
    "lr_warmup_tokens": "`optim.warmup_steps`, by the global batch",
    "lr_warmup_fraction": "`optim.warmup_steps`, of `optim.decay_steps`",
    "lr_wsd_decay_samples": "`optim.wsd_decay_steps`, by the global batch",
    "lr_decay_ratio": "`optim.schedule` wsd and `optim.wsd_decay_steps`, of `optim.decay_steps`",
    "lr_decay_type": "`optim.schedule`, and `optim.wsd_decay` with a ratio",
    "min_lr_factor": "`optim.min_lr`, as a part of `optim.lr`",
    "scale_of_power": "`train.initial_loss_scale`, 2 to this power",
    "window_size": "`model.window`, one more than the tokens before a query",
    "window_pattern": "`model.window_every`",
    "layers_per_virtual_stage": "`parallel.virtual_stages`, by layers and `parallel.pp`",
    "replicas": "`parallel.dp_shard`, by the ranks of dp; with a shard degree `parallel.dp`",
    "optimizer_instances": "`parallel.dp_shard`, by the ranks of dp, with stages 2 and 3",
    "expert_width": "`parallel.etp`: 1 with ep, or the ranks of tp",
    "recompute_modules": "`train.recompute_modules`: layernorm is norms, core_attn never kept",
    "selective": "`train.recompute` = selective with modules that are kept here",
    "uniform": "`train.recompute_num_layers` = 0, of units of one layer",
    "llama3_scaling": "`model.rope_scaling`, with the factors of Llama 3.1",
    "wide_wgrad": "`fp8.wgrad` = bf16",
    "format_of_gradients": "`fp8.grad_format`: hybrid is e5m2; it needs a recipe",
    "tensorboard": "`log.to`, with tensorboard",
    "wandb": "`log.to`, with wandb",
    "tensorboard_dir": "`log.to`, with tensorboard, and `log.tensorboard_dir`",
    "wandb_project": "`log.to`, with wandb, and `log.project`",
    "report_to": "`log.to`, beside the metrics file",
    "data_path": "`data.stores` and `data.weights`",
    "train_data_path": "`data.stores` and `data.weights`",
    "valid_data_path": "`data.valid.stores` and `data.valid.weights`",
    "eval_iters": "`data.valid.num_samples`, by the global batch",
    "split": "`data.split`, `data.order` and, for evaluations, `data.valid.order`",
}


def foreign_names_page() -> str:
    """Return the page of all programs: what is taken, what needs nothing, what does not exist."""
    sections = [INTRO]
    for program, title in PROGRAMS.items():
        kinds: dict[str, list[tuple[str, str]]] = {"taken": [], "so": [], "no": []}
        for entry in entries(program):
            for word, meaning in meanings(entry):
                kind = meaning.kind if meaning.kind in kinds else "taken"
                kinds[kind].append((shown(entry, word), cell_of(meaning)))
        sections.append(f"## {TITLES.get(program, title)}\n")
        for kind, heading in (
            ("taken", "What is taken"),
            ("so", "What needs nothing: it is so here, or makes no difference"),
            ("no", "What does not exist"),
        ):
            sections.append(f"### {heading} {{#{program.replace('_', '-')}-{kind}}}\n")
            sections.append(block("keys", table(("there", "here"), kinds[kind])))
    return "\n".join(sections)


def meanings(entry: Entry) -> Sequence[tuple[str, Meaning]]:
    """Return what an entry means, with the word for which it does."""
    if isinstance(entry.answer, str):
        return [("", Meaning.of(entry.answer))]
    return [(word, Meaning.of(text)) for word, text in entry.answer.items()]


def shown(entry: Entry, word: str) -> str:
    """Return a name with its value as the cell of a table."""
    value = "other" if word == "*" else word or entry.metavar.removesuffix("?")
    return code(f"{entry.name} {value}".strip())


def cell_of(meaning: Meaning) -> str:
    """Return what a name is here as the cell of a table."""
    if meaning.kind == "sets":
        return ", ".join(code(word.replace("=", " = ").replace("*", " × ")) for word in meaning.text.split())
    if meaning.kind == "by":
        return "; ".join([FUNCTIONS[meaning.text], *([plain(meaning.why)] if meaning.why else [])])
    return "its keys are read" if meaning.kind == "reads" else plain(meaning.text)
