"""Cool-downs: from a saved step on the rate falls to min_lr, and the run ends there.

The rate begins where the step before would have gone on, whatever the schedule was. It is recorded with the step that
it began at, so that every later start of the run follows the same line.
"""

from dataclasses import replace

from threefold.errors import UserError
from trainer.config import Config
from trainer.store.lr import learning_rate


def with_cool_down(config: Config, before: Config, step: int) -> Config:
    """Return the settled configuration of a run that goes on from a step with its cool-down, asked for now or before.

    For example `--cool-down 100` from step 500 ends at step 600. A later start with as many steps, or none named, goes
    on with that.
    """
    asked, was = config.optim, before.optim
    is_going_on = asked.cool_down_steps in (0, was.cool_down_steps) and asked.cool_down_from in (0, was.cool_down_from)
    if was.cool_down_steps > 0 and is_going_on:
        steps, first, rate = was.cool_down_steps, was.cool_down_from, was.cool_down_lr
    elif asked.cool_down_steps > 0:
        steps, first = asked.cool_down_steps, asked.cool_down_from or step
        rate = asked.cool_down_lr or learning_rate(was, first)
    else:
        return replace(config, optim=replace(asked, cool_down_steps=0))
    optim = replace(asked, cool_down_steps=steps, cool_down_from=first, cool_down_lr=rate)
    return replace(config, optim=optim, train=replace(config.train, train_steps=first + steps))


def require_step(config: Config, what: str) -> None:
    """Raise UserError if a start without a saved state asks for a cool-down."""
    if config.optim.cool_down_steps > 0:
        hint = f"--load RUN/step-000000100 --cool-down {config.optim.cool_down_steps}"
        raise UserError(f"a cool-down begins from a saved step: {what}", hint=hint)
