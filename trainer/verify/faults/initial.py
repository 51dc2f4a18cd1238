"""Faults of initial values: how wide they are, and what they are drawn from."""

from dataclasses import replace
from typing import Any

from trainer import engine
from trainer.store import parameter
from trainer.verify.faults.fault import INITIAL, TP, Fault
from trainer.verify.faults.planting import wrapping


def as_wide_as_others(real: Any, config: Any) -> Any:
    """Let what adds to the residual stream be as wide as other matrices."""
    table = real(config)
    return {
        name: replace(row, std=config.model.init_std) if row.std and row.decay else row for name, row in table.items()
    }


def norms_from_zero(real: Any, config: Any) -> Any:
    return {name: replace(row, std=0.0) if row.std is None else row for name, row in real(config).items()}


def biases_drawn(real: Any, config: Any) -> Any:
    return {
        name: replace(row, std=config.model.init_std) if name.endswith(".bias") else row
        for name, row in real(config).items()
    }


def variance_for_deviation(real: Any, values: Any, seed: int, name: str, shape: Any, offset: Any, std: float) -> None:
    real(values, seed, name, shape, offset, std * std)


def one_name_for_all(real: Any, values: Any, seed: int, name: str, *rest: Any) -> None:
    real(values, seed, "", *rest)


def counted_from_own_rows(
    real: Any, values: Any, seed: int, name: str, shape: Any, offset: tuple[int, ...], std: float
) -> None:
    real(values, seed, name, shape, (0,) * len(offset), std)


INITIAL_FAULTS = (
    Fault(
        "residual-not-scaled",
        "what adds to the residual stream begins as wide as other matrices",
        None,
        wrapping(engine, "parameter_table", as_wide_as_others),
        check=INITIAL,
    ),
    Fault(
        "variance-for-deviation",
        "initial values have the square of their deviation",
        None,
        wrapping(parameter, "normal_", variance_for_deviation),
        check=INITIAL,
    ),
    Fault(
        "norms-from-zero",
        "norms begin at zero",
        None,
        wrapping(engine, "parameter_table", norms_from_zero),
        check=INITIAL,
    ),
    Fault(
        "biases-drawn",
        "biases are drawn as matrices are",
        None,
        wrapping(engine, "parameter_table", biases_drawn),
        check=INITIAL,
    ),
    Fault(
        "one-name-for-all",
        "tensors are drawn without their names, so equal shapes begin alike",
        None,
        wrapping(parameter, "normal_", one_name_for_all),
        check=INITIAL,
    ),
    Fault(
        "counted-from-own-rows",
        "each rank draws its part as if it were the first",
        TP,
        wrapping(parameter, "normal_", counted_from_own_rows),
        check=INITIAL,
    ),
)
