"""The entries of a comparison, written as `softmax`, `marc`, `marc:solver=sgd` or `balanced-softmax+marc`.

A stage-one method trains a network. A post-hoc method calibrates one: that of softmax, or of the stage-one method
before the plus sign.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from longtail.backbones import build_backbone
from longtail.errors import UserError, choose
from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS, PostHocMethod, TrainMethod, build_posthoc, describe_posthoc
from longtail.posthoc.base import PostHoc, unfitted
from longtail.runs.folder import Run, build_posthoc_for

PLUS = re.compile(r"\+(?=[a-z])")  # 1e+5 is a number


@dataclass(frozen=True)
class Entry:
    """A method of the comparison with its options.

    Args:
        name: in `longtail methods`, or the name of the class of a user's method.
        options: as text.
        estimator: a post-hoc method given as an object.
        base: the stage-one method whose network a post-hoc method calibrates; None for softmax.
    """

    name: str
    options: tuple[tuple[str, str], ...] = ()
    estimator: PostHoc | None = None
    base: Entry | None = None

    @classmethod
    def of(cls, method: str | PostHoc) -> Entry:
        """Read an entry; invalid names, options and values are refused now, not after hours of training."""
        if not isinstance(method, str):
            method.check_settings()
            defaults = type(method)().get_params()
            changed = {key: value for key, value in method.get_params().items() if value != defaults[key]}
            options = tuple((key, str(value)) for key, value in changed.items())
            return cls(describe_posthoc(method)[1], options, method)
        first, *more = PLUS.split(method)
        entry = cls._of_text(first)
        if not more:
            return entry
        if len(more) > 1 or entry.stage != 1:
            raise UserError(f"{method!r} must be a stage-one method, a plus sign and a post-hoc method: cbs+marc")
        second = cls._of_text(more[0])
        if second.stage != 2:
            raise UserError(f"{second.name} trains a network of its own, so it does not go on top of {entry.name}")
        return second if entry == BASE else cls(second.name, second.options, base=entry)

    @classmethod
    def _of_text(cls, text: str) -> Entry:
        name, _, rest = text.partition(":")
        choose("method", name, (*TRAIN_METHODS, *POSTHOC_METHODS))
        pairs = []
        for item in filter(None, rest.split(",")):
            option, equals, value = item.partition("=")
            if not equals:
                raise UserError(f"options of a method are written name=value, found {item!r} in {text!r}")
            pairs.append((option, value))
        entry = cls(name, tuple(pairs))
        if entry.stage == 2:
            entry.build().check_settings()
        else:
            with torch.random.fork_rng(devices=()):  # fitted on a few samples, so that it checks its settings
                TRAIN_METHODS[name].build(build_backbone("digits", 1), torch.tensor([90, 9, 3]), dict(pairs))
        return entry

    def build(self, run: Run | None = None) -> PostHoc:
        """The post-hoc method, not fitted; with a run, it has the stage-two settings for the data of the run."""
        if self.estimator is not None:
            return unfitted(self.estimator)
        if run is None:
            return build_posthoc(self.name, dict(self.options))
        return build_posthoc_for(run, self.name, dict(self.options))

    @property
    def needs_validation(self) -> bool:
        """Whether held-out images are needed, to choose a setting or to fit the method."""
        return self.stage == 2 and self.build().needs_validation

    @property
    def stage(self) -> int:
        return 1 if self.estimator is None and self.name in TRAIN_METHODS else 2

    @property
    def stage_one(self) -> Entry:
        """The method that trains the network."""
        return self if self.stage == 1 else self.base or BASE

    @property
    def streams(self) -> int:
        """Streams of images that a step of training draws a batch from."""
        return len(TRAIN_METHODS[self.stage_one.name].samplers)

    @property
    def label(self) -> str:
        """Name for files and tables."""
        label = "-".join([self.name, *(f"{name}={value}" for name, value in self.options)])
        return f"{self.base.label}+{label}" if self.base else label

    @property
    def _description(self) -> TrainMethod | PostHocMethod:
        return TRAIN_METHODS[self.name] if self.stage == 1 else describe_posthoc(self.build())[0]

    @property
    def title(self) -> str:
        options = ", ".join(f"{name} {value}" for name, value in self.options)
        title = f"{self._description.title} ({options})" if options else self._description.title
        return f"{self.base.title} + {title}" if self.base else title

    @property
    def family(self) -> str:
        return self._description.family


BASE = Entry("softmax")
