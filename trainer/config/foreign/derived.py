"""What a foreign flag is where that depends on other options: worked out when the configuration is complete.

Command lines keep such a flag under its MARK and the name of a function here. Each takes the configuration as it is so
far and the flag's text, and returns the options that it sets; ValueError says what is wrong with the text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from datakit import BatchSizes
from threefold.flags import Settings
from threefold.options import Fault, FlagText, merge, walk
from trainer.config import Config
from trainer.config.resolve import ranks_a_sample

MARK = "~"
PATTERN = re.compile(r"\(?\[(?P<kinds>[01](?:,[01])*)\](?:\*(?P<times>\d{1,4}))?\)?")  # of layers, 1 with a window

IN_STEPS = {  # what flags count, and the options that have it in steps
    "train_samples": ("samples", "train.train_steps"),
    "train_tokens": ("tokens", "train.train_steps"),
    "lr_decay_samples": ("samples", "optim.decay_steps"),
    "lr_decay_tokens": ("tokens", "optim.decay_steps"),
    "lr_warmup_samples": ("samples", "optim.warmup_steps"),
    "lr_warmup_tokens": ("tokens", "optim.warmup_steps"),
    "lr_wsd_decay_samples": ("samples", "optim.wsd_decay_steps"),
    "lr_warmup_fraction": ("fraction", "optim.warmup_steps"),
}
# what each sets and no other flag may: Megatron-LM refuses two
ALONE = {name: option for name, (unit, option) in IN_STEPS.items() if unit != "tokens"}


class NotConverted(ValueError):
    """A dataset that is to become a store first; `options` name it as if it was one."""

    def __init__(self, message: str, options: dict[str, str]) -> None:
        super().__init__(message)
        self.options = options


def complete(
    tables: Mapping[str, Any], overrides: Settings, faults: list[Fault], world_size: int = 0
) -> dict[str, FlagText]:
    """Return settings with what their marked ones set; faults of these go into `faults`.

    They see the ranks of dp that a world of `world_size` leaves, where no option says how many.
    """
    settings = {name: text for name, text in overrides.items() if not name.startswith(MARK)}
    for name, work_out in FUNCTIONS.items():  # in this order: later ones see what earlier ones set
        text = overrides.get(MARK + name)
        if text is None:
            continue
        draft = walk(Config, merge(tables, settings), [])
        left_over = world_size // ranks_a_sample(draft)
        draft = replace(draft, parallel=replace(draft.parallel, dp=draft.parallel.dp or left_over))
        try:
            options = work_out(draft, text)
        except ValueError as error:
            options = error.options if isinstance(error, NotConverted) else {}
            faults.append((set(options), f"{text.flag}: {error}"))
        other = settings.get(ALONE.get(name, ""))
        if other is not None and not (is_number(other.text) and float(other.text) == 0):
            faults.append((set(), f"{text.flag}: {other.flag} {other.text} says it too, and one of them alone can"))
        settings |= {option: FlagText(value, text.flag) for option, value in options.items()}
    return settings


def whole(text: FlagText, what: str) -> int:
    """Return the whole number that a flag has; ValueError if it has none of 0 or more."""
    with suppress(ValueError):
        if (number := int(text.text)) >= 0:
            return number
    raise ValueError(f"must be a number of {what}, got {text.text!r}")


def window_size(_config: Config, text: FlagText) -> dict[str, str]:
    """Return how many tokens a query sees that sees so many before it and none behind: one more, its own; -1 is all."""
    numbers = text.text.strip("() ").split(",")
    with suppress(ValueError):
        left, right = map(int, numbers)
        if left >= -1 and right in (-1, 0):
            return {"model.window": str(left + 1)}
    raise ValueError(f"must be as 1023,0: so many tokens before a query and none behind, got {text.text!r}")


def window_pattern(config: Config, text: FlagText) -> dict[str, str]:
    """Return which layers see all: every N-th, or those that are 0 in a list as [1,1,0]*4, if they are every N-th."""
    if text.text.strip().isdecimal():
        return {"model.window_every": text.text.strip()}
    match = PATTERN.fullmatch(text.text.replace(" ", ""))
    kinds = match["kinds"].split(",") * int(match["times"] or 1) if match else []
    every = kinds.index("0") + 1 if "0" in kinds else 0
    expected = ["0" if every and number % every == 0 else "1" for number in range(1, len(kinds) + 1)]
    if len(kinds) != config.model.num_layers or kinds != expected or every == 1:
        wanted = f"must be N, of which every N-th layer sees all, or a list of {config.model.num_layers} as [1,1,0]*4"
        raise ValueError(f"{wanted}, with every N-th layer 0, got {text.text!r}")
    return {"model.window_every": str(every)}


def in_steps(unit: str, option: str, config: Config, text: FlagText) -> dict[str, str]:
    """Return the steps that so many samples or tokens are, or this fraction of the schedule."""
    train = config.train
    if unit != "fraction":
        samples = whole(text, unit) // (train.seq_length if unit == "tokens" else 1)
        grows = option != "optim.wsd_decay_steps" and not any(train.faults("train"))  # those are the last steps
        sizes = train.sizes() if grows else BatchSizes(train.global_batch_size)
        return {option: str(sizes.steps_before(0, samples))}
    if not is_number(text.text) or float(text.text) > 1:
        raise ValueError(f"must be a fraction from 0 to 1, got {text.text!r}")
    return {option: str(round(float(text.text) * (config.optim.decay_steps or train.train_steps)))}


def fall_of_ratio(config: Config, text: FlagText) -> dict[str, str]:
    """Return the schedule that falls in this fraction of its steps."""
    return {"optim.schedule": "wsd", **in_steps("fraction", "optim.wsd_decay_steps", config, text)}


def fall_of_type(config: Config, text: FlagText) -> dict[str, str]:
    """Return the schedule that falls in this way: in its last steps if their ratio is known, else after the warm-up."""
    if text.text not in ("linear", "sqrt", "cosine"):
        raise ValueError(f"must be linear, sqrt or cosine, got {text.text!r}")
    if config.optim.schedule == "wsd":
        return {"optim.wsd_decay": text.text}
    if text.text != "sqrt":
        return {"optim.schedule": text.text}
    steps = (config.optim.decay_steps or config.train.train_steps) - config.optim.warmup_steps
    return {"optim.schedule": "wsd", "optim.wsd_decay_steps": str(steps), "optim.wsd_decay": "sqrt"}


def virtual_stages(config: Config, text: FlagText) -> dict[str, str]:
    """Return how many stages a rank holds of so many layers each."""
    size, layers, pp = whole(text, "layers"), config.model.num_layers, config.parallel.pp
    if not size or layers % (size * pp):
        raise ValueError(f"{layers} layers on --pp {pp} are not cut into stages of {text.text}: --vpp 1")
    return {"parallel.virtual_stages": str(layers // (size * pp))}


def replicas(config: Config, text: FlagText) -> dict[str, str]:
    """Return the shard groups that are so many replicas: those of the size that is asked for, or of all ranks of dp."""
    number, dp, size = whole(text, "replicas"), config.parallel.dp, config.parallel.dp_shard
    if number < 2:
        return {}
    if size:
        return {"parallel.dp": str(number * size), "parallel.zero_stage": "3"}
    if not dp:
        raise ValueError(f"{number} replicas are of ranks of dp that no flag counts: --dp {2 * number}")
    if dp % number:
        raise ValueError(f"{number} does not divide the {dp} ranks of dp: --dp {-(-dp // number) * number}")
    return {"parallel.dp_shard": str(dp // number), "parallel.zero_stage": "3"}


def optimizer_instances(config: Config, text: FlagText) -> dict[str, str]:
    """Return the shard groups that are so many instances, where more than optimizer states are cut."""
    if config.parallel.zero_stage < 2:
        return {}
    found = replicas(replace(config, parallel=replace(config.parallel, dp_shard=0)), text)
    return {name: value for name, value in found.items() if name == "parallel.dp_shard"}


def expert_width(config: Config, text: FlagText) -> dict[str, str]:
    """Return that no rank cuts an expert by its width, where ep may borrow those of tp; all of tp do otherwise."""
    number, tp, ep = whole(text, "ranks"), config.parallel.tp, config.parallel.ep
    if number == tp or (number == 1 and not config.model.num_experts):
        return {}
    if number == 1 and ep > 1:
        return {"parallel.etp": "1"}
    if number == 1:
        raise ValueError(f"1 of tp {tp} lets ep borrow ranks of tp, and ep is 1: --ep {tp} --etp 1")
    raise ValueError(f"{number}: an expert is cut by all of tp {tp}, or by none of it: --etp tp")


MADE_AGAIN = {  # what Megatron calls modules, and what they are here; the softmax of core_attn is never kept here
    "norms": "norms", "mlp": "mlp", "attention": "attention", "layernorm": "norms", "core_attn": "",
}  # fmt: skip


def recompute_modules(_config: Config, text: FlagText) -> dict[str, str]:
    """Return the modules of a layer that are made again, in Megatron's words or ours."""
    words = " ".join([text.text, *text.more]).replace(",", " ").split()
    if unknown := [word for word in words if word not in MADE_AGAIN]:
        known = "norms, mlp and attention; of Megatron layernorm, mlp and core_attn"
        raise ValueError(f"{unknown[0]!r} is not made again here, but {known}")
    return {"train.recompute_modules": ",".join(dict.fromkeys(MADE_AGAIN[word] for word in words if MADE_AGAIN[word]))}


def selective(config: Config, _text: FlagText) -> dict[str, str]:
    """Return that modules are made again, if any is named that is kept here: the softmax of attention never is."""
    return {"train.recompute": "selective"} if config.train.recompute_modules else {}


def uniform(config: Config, _text: FlagText) -> dict[str, str]:
    """Return that all layers are made again, in Megatron's units of one layer; ValueError for longer units."""
    size = config.train.recompute_num_layers
    if size > 1:
        raise ValueError(f"each layer is made again by itself, not {size} as one: --recompute-num-layers 1")
    return {"train.recompute_num_layers": "0"}


def llama3_scaling(config: Config, _text: FlagText) -> dict[str, str]:
    """Return the frequencies of Llama 3.1, divided by 8 unless something else is said."""
    factor = config.model.rope_factor
    return {
        "model.rope_scaling": "llama3",
        "model.rope_factor": f"{factor if factor != 1 else 8.0}",
        "model.rope_low_factor": "1.0",
        "model.rope_high_factor": "4.0",
        "model.rope_original_length": "8192",
    }


def least_rate(config: Config, text: FlagText) -> dict[str, str]:
    """Return the least rate that is this part of the largest."""
    try:
        return {"optim.min_lr": repr(float(text.text) * config.optim.lr)}
    except ValueError:
        raise ValueError(f"must be a number, got {text.text!r}") from None


def evaluated(config: Config, text: FlagText) -> dict[str, str]:
    """Return the samples of so many batches; without any nothing is evaluated."""
    batches = whole(text, "batches")
    if not batches:
        return {"train.eval_interval": "0"}
    return {"data.valid.num_samples": str(batches * config.train.global_batch_size)}


def split(config: Config, text: FlagText) -> dict[str, str]:
    """Return Megatron's datasets with these shares, of which the second validates where nothing else does."""
    shares, options = [share.strip() for share in text.text.split(",")], {"data.order": "megatron"}
    options["data.split"] = ",".join(shares)
    interval, valid = config.train.eval_interval, config.data.valid
    with suppress(ValueError):  # the walker reports a share that is not a number
        if interval and not valid.stores and len(shares) > 1 and float(shares[1]) > 0:
            times = config.train.train_steps // interval + 1
            options |= {"data.valid.order": "megatron", "data.valid.order_samples": str(times * valid.num_samples)}
    return options


def stores(text: FlagText, table: str) -> dict[str, str]:
    """Return stores, and weights where each has one before it; ValueError for what Megatron reads itself."""
    words = " ".join([text.text, *text.more]).split()
    weights, paths = words[0::2], words[1::2]
    if len(words) % 2 or not all(map(is_number, weights)):
        weights, paths = [], words
    weighed = {f"{table}.weights": ",".join(weights)} if weights else {}
    options = {f"{table}.stores": ",".join(paths), **weighed}
    foreign = [path for path in paths if Path(f"{path}.idx").is_file()]
    if foreign:
        what = f"{foreign[0]} is a dataset of Megatron: datakit convert {foreign[0]} --output STORE makes a store of it"
        raise NotConverted(f"{what}, without tokenizing again", options)
    return options


def is_number(text: str) -> bool:
    """Return whether a text is a number."""
    with suppress(ValueError):
        return float(text) >= 0
    return False


def scale_of_power(_config: Config, text: FlagText) -> dict[str, str]:
    """Return the loss scale that is so many doublings of 1."""
    power = whole(text, "doublings")
    if power > 127:
        raise ValueError(f"must be at most 127 doublings, which fp32 holds, got {text.text}")
    return {"train.initial_loss_scale": str(2**power)}


def format_of_gradients(config: Config, text: FlagText) -> dict[str, str]:
    """Return the format of gradients; ValueError without a recipe, as that of Megatron-LM is delayed then."""
    formats = {"e4m3": "e4m3", "hybrid": "e5m2"}
    if text.text not in formats:
        raise ValueError(f"must be e4m3 or hybrid, got {text.text!r}")
    if config.fp8.recipe == "off":
        raise ValueError("scales are of the values at hand here, not of steps before: --fp8-recipe tensorwise")
    return {"fp8.grad_format": formats[text.text]}


def also_to(names: Sequence[str], config: Config, _text: FlagText) -> dict[str, str]:
    """Return the sinks of a run with those of some names among them."""
    return {"log.to": ",".join(dict.fromkeys([*config.log.to, *names]))}


def reported_to(config: Config, text: FlagText) -> dict[str, str]:
    """Return the sinks that are named, beside the metrics file; ValueError for others."""
    names = [name for name in (text.text, *text.more) if name != "none"]
    if unknown := [name for name in names if name not in ("tensorboard", "wandb", "mlflow")]:
        raise ValueError(f"must be of tensorboard, wandb and mlflow, got {' '.join(unknown)}")
    return also_to(names, config, text) if names else {}


FUNCTIONS: dict[str, Callable[[Config, FlagText], dict[str, str]]] = {
    **{name: partial(in_steps, *how) for name, how in IN_STEPS.items()},
    "lr_decay_ratio": fall_of_ratio,
    "lr_decay_type": fall_of_type,
    "min_lr_factor": least_rate,
    "scale_of_power": scale_of_power,
    "window_size": window_size,
    "window_pattern": window_pattern,
    "layers_per_virtual_stage": virtual_stages,
    "llama3_scaling": llama3_scaling,
    "replicas": replicas,
    "optimizer_instances": optimizer_instances,
    "expert_width": expert_width,
    "recompute_modules": recompute_modules,
    "selective": selective,
    "uniform": uniform,
    "data_path": lambda _, text: stores(text, "data"),
    "valid_data_path": lambda _, text: stores(text, "data.valid"),
    "eval_iters": evaluated,
    "split": split,
    "wide_wgrad": lambda _, text: {"fp8.wgrad": "bf16"},  # before --fp8-recipe as well as behind it
    "format_of_gradients": format_of_gradients,
    "tensorboard": partial(also_to, ["tensorboard"]),
    "wandb": partial(also_to, ["wandb"]),
    "tensorboard_dir": lambda config, text: also_to(["tensorboard"], config, text) | {"log.tensorboard_dir": text.text},
    "wandb_project": lambda config, text: also_to(["wandb"], config, text) | {"log.project": text.text},
    "report_to": reported_to,
    "train_data_path": lambda _, text: stores(text, "data") | {"data.split": ""},
}
