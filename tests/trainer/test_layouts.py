"""Random models on random layouts train as one process does: losses, gradient norms, evaluations and final weights.

The ranks are threads of one process, so that a layout takes a fraction of a second. Examples are the same in each run.
"""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.layouts import configs, layouts
from tests.trainer.support.parity import alone, assert_parity, run_steps
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.verify.threads import run_threads

OF_64 = st.sampled_from([ParallelLayout(tp=4, pp=4, dp=4), ParallelLayout(tp=2, cp=4, pp=2, dp=4)])
examples = settings(derandomize=True, database=None, phases=[Phase.generate, Phase.shrink])


def check(config: Config, num_steps: int) -> None:
    reference = run_steps(0, alone(config), num_steps)
    assert_parity(run_threads(layout_of(config).world_size, run_steps, config, num_steps), reference)


@settings(examples, max_examples=8)
@given(config=configs(layouts(16)))
def test_random_layouts_of_up_to_16_ranks(config: Config) -> None:
    check(config, 2 if layout_of(config).world_size <= 6 else 1)


@pytest.mark.ci
@pytest.mark.slow
@settings(examples, max_examples=60)
@given(config=configs(layouts(16)))
def test_more_random_layouts(config: Config) -> None:
    check(config, 2 if layout_of(config).world_size <= 6 else 1)


@pytest.mark.ci
@pytest.mark.slow
@settings(examples, max_examples=2)
@given(config=configs(OF_64))
def test_layouts_of_64_ranks(config: Config) -> None:
    check(config, 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(examples, max_examples=300)
@given(config=configs(layouts(16)))
def test_many_random_layouts(config: Config) -> None:
    check(config, 3)
