"""Fit a method on stored outputs: on how many images, on which split, and a warning if they show no mistakes."""

from __future__ import annotations

import warnings

import numpy as np

from longtail.data.imbalance import Few
from longtail.distributed.world import SINGLE_PROCESS, World
from longtail.errors import UserError, choose
from longtail.outputs.record import Outputs
from longtail.posthoc.base import PostHoc
from longtail.posthoc.inputs import from_outputs
from longtail.posthoc.unseen import require_unseen

LOOKED_AT = 20_000  # training samples that are checked for mistakes of the model
ALL_KNOWN = 0.99


def fit_outputs(
    method: PostHoc, train: Outputs | None, validation: Outputs | None, world: World = SINGLE_PROCESS
) -> None:
    """Fit a method on stored outputs; the processes of `world` share the work.

    A method that must not see training images is fitted on the validation outputs.
    """
    method.check_settings()
    needed = method.needs_every_class
    held_out = None
    if validation is not None:
        held_out = from_outputs(validation, world, need_every_class=needed and method.fitted_on_unseen)
    if method.fitted_on_unseen:
        if held_out is None:
            raise UserError(
                f"{type(method).__name__} must be fitted on images that the network has not seen, but there are none: "
                "hold out images in training (--validation 0.1) or give held-out outputs (--validation FILE)"
            )
        if train is not None:
            require_unseen(from_outputs(train, world, need_every_class=False), held_out)
        method.fit_checked(held_out, None)
        return
    assert train is not None
    data = from_outputs(train, world, need_every_class=needed)
    if held_out is not None and method.chooses_a_setting:
        require_unseen(data, held_out)
    method.fit_checked(data, held_out)


def warn_if_all_is_known(method: PostHoc, train: Outputs | None) -> None:
    """Warn if the model makes no mistakes on the images that a method is fitted on."""
    if train is None or train.split != "train" or method.fitted_on_unseen or not method.learns_from_seen:
        return
    some = np.linspace(0, len(train) - 1, min(len(train), LOOKED_AT)).astype(int)
    rows = train.rows()
    right = np.concatenate(
        [rows.read(part).argmax(1).numpy() == train.labels[part] for part in np.array_split(some, min(len(some), 10))]
    )
    if right.mean() >= ALL_KNOWN:
        warnings.warn(
            f"the model classifies {100 * right.mean():.1f} % of the training images correctly, so "
            f"{type(method).__name__} can learn little about errors on new images; hold out images, use HALO or Auto "
            "(--method halo, --method auto)",
            stacklevel=2,
        )


def chosen_images(choice: int | str, method: PostHoc, class_counts: np.ndarray, seed: int = 0) -> Few | None:
    """Which training images a method is fitted on: a number per class, "all" or "auto"; None for all of them.

    "auto" takes `method.enough_images`; if no class has more images, all are taken.
    """
    if isinstance(choice, str):
        choose("images_per_class", choice, ("all", "auto"))
        most = method.enough_images(len(class_counts)) if choice == "auto" else None
    else:
        most = choice
    if most is None:
        return None
    few = Few(most, seed)
    return few if few.most < class_counts.max() else None
