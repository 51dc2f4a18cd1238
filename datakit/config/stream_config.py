"""StreamConfig: what a run's TOML file says of its stream. The trainer's tables extend these, so each key exists once.

Every `--help` that shows these keys reads this file, so numpy is imported by methods alone.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from datakit.config.mixture_config import MixtureConfig, Plan, plan, segments
from datakit.config.step_config import StepConfig
from datakit.config.steps import Steps
from threefold.errors import UserError
from threefold.needs import unmet
from threefold.options import Fault, option, raise_faults

if TYPE_CHECKING:
    from datakit.batches.batch import BatchOptions
    from datakit.order.blend import Blend
    from datakit.order.stream_record import Recorded
    from datakit.store.token_store import TokenStore
    from datakit.tokenization.identity import TokenizerIdentity

SAMPLE = "examples/gpt-small.toml"
PACKED, MEGATRON = ("best_fit", "pad"), {"order": "megatron"}
READS_URLS = {"a store behind a URL": lambda table: not table.places or any("://" in path for path in table.places)}
READS_FILES = {"a store on a file system": lambda table: not all("://" in path for path in table.places or [""])}


@dataclass(frozen=True, slots=True)
class BlendConfig:
    """Token stores with their weights."""

    stores: tuple[str, ...] = option((), "token stores, made by datakit preprocess", keeps_bits=True)
    weights: tuple[float, ...] = option((), "one weight a store; empty means equal", above=0)
    packing: Literal["concat", "best_fit", "pad"] = option(
        "concat",
        "how documents become rows: concat cuts all tokens; best_fit and pad need datakit pack",
        needs={"order": "permuted"},
    )
    indices: tuple[str, ...] = option(
        (), "folders of packing indices; empty: each in its store", keeps_bits=True, needs={"packing": PACKED}
    )
    reading: Literal["auto", "mmap", "pread"] = option(
        "auto",
        "how rows are read: out of mapped files, or with reads; auto: with reads on file systems of other machines",
        keeps_bits=True,
        needs=READS_FILES,
    )
    shuffle: Literal["rows", "blocks"] = option(
        "rows",
        "what is shuffled: single rows, or for stores behind URLs blocks of rows, and the rows of some blocks",
        needs={"order": "permuted"},
    )
    block_tokens: int = option(1 << 22, "tokens of a block of shuffle = blocks", minimum=1, needs={"shuffle": "blocks"})
    cache: str = option(
        "", "local folder, through which stores behind URLs are read", keeps_bits=True, needs=READS_URLS
    )
    cache_mib: int = option(
        10240, "its size; the processes of a machine share it", minimum=1, keeps_bits=True, needs=READS_URLS
    )

    def faults(self, table: str) -> list[Fault]:
        """Return the faults between stores, weights, packing and cache of this table."""
        counts = {name: count for name in ("weights", "indices") if (count := len(getattr(self, name)))}
        faults: list[Fault] = [
            ({f"{table}.{name}", f"{table}.stores"},
             f"{table}.{name} has {count} entries for {len(self.stores)} {table}.stores")
            for name, count in counts.items()
            if count != len(self.stores)
        ]  # fmt: skip
        remote = [path for path in self.places if "://" in path]
        if remote and not self.cache:
            text = f"{remote[0]} is read through a local folder, and {table}.cache names none"
            faults.append(({f"{table}.cache", f"{table}.stores"}, f"{text}: --{table}.cache /local/cache"))
        return faults

    @property
    def places(self) -> tuple[str, ...]:
        """The paths and URLs of all stores that are named."""
        return self.stores

    def open_store(self, number: int, path: str, seq_length: int) -> "TokenStore":
        """Return a store, whose rows are as `packing` says; those that join later keep their index in themselves."""
        from datakit.rows.packed_rows import Packing
        from datakit.store.token_store import TokenStore

        index = self.indices[number] if number < len(self.indices) else None
        rows = None if self.packing == "concat" else Packing(self.packing, seq_length, index)
        if "://" in path:
            return TokenStore.open(path, cache=self.cache or None, cache_mib=self.cache_mib, rows=rows)
        return TokenStore.open(path, reading=self.reading, rows=rows)

    def tokenizer_of(self, path: str) -> "TokenizerIdentity":
        """Return what made a store of this table; errors as of TokenStore.open."""
        from datakit.format.manifest import Manifest
        from datakit.shards.store_source import StoreSource

        return (StoreSource.open(path).manifest if "://" in path else Manifest.read(Path(path))).tokenizer

    def check(self, table: str) -> None:
        """Raise UserError if there are no stores, or if this table has faults."""
        if not self.stores:
            raise UserError(
                f"{table}.stores names no token store", hint=f"--{table}.stores DIR, made by datakit preprocess"
            )
        raise_faults(f"[{table}]", self.faults(table) + unmet(self, f"{table}."), hint=f"{SAMPLE} documents every key")

    @property
    def copies_differ(self) -> bool:
        """Whether copies of a store have an order each, as they have but in older runs."""
        return True

    def open(self, steps: StepConfig, *, table: str) -> "Blend":
        """Return the blend of the stores; UserError if there are none, or weights for more or fewer."""
        from datakit.order.blend import Blend

        self.check(table)
        stores = [self.open_store(number, path, steps.seq_length) for number, path in enumerate(self.stores)]
        return Blend(
            list(zip(stores, self.weights or [1.0] * len(stores), strict=True)),
            seq_length=steps.seq_length,
            seed=steps.seed,
            block_tokens=self.shuffled_tokens,
            orders_copies=self.copies_differ,
        )

    @property
    def shuffled_tokens(self) -> int:
        """The tokens of a block that is shuffled, 0 if single rows are."""
        return self.block_tokens if self.shuffle == "blocks" else 0


@dataclass(frozen=True, slots=True)
class StreamConfig(BlendConfig):
    """`[data]`: the stream that a run trains on."""

    mask_eod_loss: bool = option(False, "leave the loss at end-of-document tokens out")
    reset_positions: bool = option(False, "count positions from 0 after each end of document")
    document_mask: bool = option(False, "let attention not cross documents")
    pad_to_multiple_of: int = option(
        0,
        "cut batches of packed rows to their longest one, rounded up to a multiple of this; 0: whole rows",
        minimum=0,
        needs={"packing": PACKED},
    )
    max_epochs: int = option(0, "epochs after which the run saves and ends; 0: no end", minimum=0, keeps_bits=True)
    mixture: tuple[MixtureConfig, ...] = option(
        (), "what changes from a sample on: [[data.mixture]]", keeps_bits=True, needs={"order": "permuted"}
    )
    order: Literal["permuted", "megatron"] = option(
        "permuted", "which sample comes when: megatron repeats the datasets of megatron-core"
    )
    split: tuple[float, ...] = option(
        (), "megatron: shares of training, validation and test documents; empty: all train", minimum=0, needs=MEGATRON
    )
    train_samples: int = option(
        0, "megatron: samples of the whole run; 0: up to train.train_steps", minimum=0, needs=MEGATRON
    )
    mid_level_dataset_surplus: float = option(
        0.005, "megatron: what each weighted store holds beyond", minimum=0, needs=MEGATRON
    )
    start_sample: int = option(
        0, "megatron: the sample of the order at which the run begins", minimum=0, needs=MEGATRON
    )

    @property
    def places(self) -> tuple[str, ...]:
        """The paths and URLs of all stores that are named, of those that join later too."""
        return (*self.stores, *(path for later in self.mixture for path in later.add))

    @property
    def plan(self) -> Plan:
        """The sources of the stream and their weights, of a table without faults."""
        return plan(self.stores, self.weights, self.mixture, "data")[0]

    def faults(self, table: str) -> list[Fault]:
        """Return the faults between the fields of this table."""
        from datakit.rows.megatron_order import split_fault

        faults = BlendConfig.faults(self, table)
        if self.split and (fault := split_fault(self.split)):
            faults.append(({f"{table}.split"}, f"{table}.{fault}"))
        return faults or plan(self.stores, self.weights, self.mixture, table)[1]

    def open(
        self, steps: StepConfig, *, table: str, recorded: "Recorded | None" = None, is_draft: bool = False
    ) -> "Blend":
        """Return the blend of the stores and of all mixtures.

        `recorded` is what the run recorded last: with it a store that is read no more may be gone, and a step stays the
        sample that it was. A draft, which is to be checked and not read, does without both. UserError as of
        BlendConfig, and for a store that is gone and still read.
        """
        from datakit.order.blend import Blend
        from datakit.order.stream_record import Recorded

        self.check(table)
        if self.order == "megatron":
            return self._open_megatron(steps)
        known, planned = recorded or Recorded(None, 0, 0), self.plan
        stores = [
            self._store(number, planned, known, steps, is_draft=is_draft) for number in range(len(planned.sources))
        ]
        counted = self.steps_of(steps, known)
        begins = known.begins_of_steps
        later = segments(planned, self.mixture, lambda step: begins.get(step, counted.num_counted(step - 1)), table)
        if is_draft:  # which samples steps are is not known
            later = [replace(segment, from_sample=1 + number, skip=()) for number, segment in enumerate(later)]
        blend = Blend(
            list(zip(stores, planned.weights[0], strict=True)),
            later=later,
            seq_length=steps.seq_length,
            seed=steps.seed,
            block_tokens=self.shuffled_tokens,
        )
        if is_draft:
            return blend
        blend.sources.check_steps(known.num_samples, counted.sizes)
        for number, store in enumerate(blend.stores):
            sample = blend.mixture.reads_from(number, known.num_samples) if store.shards.is_gone else None
            if sample is not None:
                path, first = planned.sources[blend.sources.owners[number]], max(known.num_samples, 1)
                raise UserError(
                    f"the token store {path} is gone, and read from sample {sample} on",
                    hint=f'bring it back, or append [[data.mixture]], from_sample = {first}, remove = ["{path}"]',
                )
        return blend

    def steps_of(self, steps: StepConfig, recorded: "Recorded | None" = None) -> Steps:
        """Return which samples steps read; their batch size may have changed up to what a checkpoint recorded."""
        sizes = steps.sizes(self.start_sample)
        if recorded is None or not recorded.step:  # a state_dict knows no steps
            return Steps(sizes)
        return Steps(sizes, recorded.step, recorded.num_samples)

    def _open_megatron(self, steps: StepConfig) -> "Blend":
        """Return the stream of megatron-core's training datasets; UserError if it ends before the run does."""
        counted = self.steps_of(steps)
        num_samples = counted.num_samples(steps.train_steps)
        needed = self.start_sample + num_samples
        blend = self._in_order(steps, self.train_samples or needed, start_sample=self.start_sample)
        if blend.mixture.max_samples < num_samples:
            size = self.start_sample + blend.mixture.max_samples
            raise UserError(
                f"the run reads {needed} samples of the order, and the order has {size}",
                hint=f"--data.train-samples {needed}, or --train-steps {counted.num_whole(blend.mixture.max_samples)}",
            )
        return blend

    def open_valid(self, steps: StepConfig, num_samples: int) -> "Blend":
        """Return the stream of megatron-core's validation datasets for so many samples in all.

        They are of the documents that `split` keeps for validation. UserError if it keeps none.
        """
        self.check("data")
        return self._in_order(steps, num_samples, part="valid")

    def _in_order(
        self, steps: StepConfig, num_samples: int, *, start_sample: int = 0, part: Literal["train", "valid"] = "train"
    ) -> "Blend":
        from datakit.order.megatron_blend import MegatronBlend
        from datakit.rows.megatron_order import MegatronOrder

        stores = [self.open_store(number, path, steps.seq_length) for number, path in enumerate(self.stores)]
        split, surplus = self.split or (1.0,), self.mid_level_dataset_surplus
        order = MegatronOrder(num_samples, split, surplus, start_sample, part)
        return MegatronBlend(stores, self.weights, seq_length=steps.seq_length, seed=steps.seed, order=order)

    def _store(
        self, number: int, planned: Plan, recorded: "Recorded", steps: StepConfig, *, is_draft: bool
    ) -> "TokenStore":
        """Return an open store, or what is known of it if its folder is gone."""
        from datakit.rows.recorded_rows import gone_store
        from datakit.shards.store_source import is_store

        path = planned.sources[number]
        rows = recorded.rows(path, steps.seq_length)
        seq_length = planned.first_length(number, self.mixture, steps.seq_length)
        exists = is_store(path) if "://" in path else os.path.exists(path)
        if exists or (not rows and planned.weights[-1][number]):
            return self.open_store(number, path, seq_length)
        if not rows and not is_draft:
            raise UserError(
                f"the token store {path} is gone, and nothing here says how much of it was read",
                hint="a checkpoint of the run does: resume it, or --recorded RUN/step-000000100/root.json for datakit",
            )
        return gone_store(path, rows, self.packing, seq_length)

    @property
    def batch_options(self) -> "BatchOptions":
        """The options of the stream's batches."""
        from datakit.batches.batch import BatchOptions

        return BatchOptions(
            self.mask_eod_loss, self.reset_positions, self.document_mask, pad_to_multiple_of=self.pad_to_multiple_of
        )
