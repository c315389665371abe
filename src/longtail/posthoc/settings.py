"""Checks of the settings that several methods have; a method calls those it needs in `check_settings`."""

from __future__ import annotations

from longtail.errors import UserError, number, whole_number


def check_exact(ridge: object, tolerance: object, max_iter: object) -> None:
    """Settings of the minimiser: weight decay, how exact, how many passes (None: the method's own)."""
    number("ridge", ridge, at_least=0)
    check_minimiser(tolerance, max_iter)


def check_minimiser(tolerance: object, max_iter: object) -> None:
    """The same without weight decay."""
    number("tolerance", tolerance, above=0)
    if max_iter is not None:
        whole_number("max_iter", max_iter)


def check_sgd(batch_size: object, lr: object, seed: object) -> None:
    """Settings of gradient steps."""
    whole_number("batch_size", batch_size)
    number("lr", lr, above=0)
    whole_number("seed", seed, at_least=0)


def number_or_auto(value: object, name: str, **bounds: float) -> None:
    """A setting is "auto" or a number within bounds."""
    try:
        if value != "auto":
            number(name, value, **bounds)
    except UserError as error:
        raise UserError(f'{error}; or "auto"') from error
