"""Probe as a post-hoc method: `calibrate` puts its head in the place of the model's own."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal, Self

import numpy as np

from longtail.errors import UserError, choose, number, whole_number
from longtail.files.tensors import as_array
from longtail.files.text import percent, some_of
from longtail.posthoc.crt import NewHead
from longtail.posthoc.inputs import FitData, require_features
from longtail.posthoc.priors import check_target_prior
from longtail.posthoc.probe.estimator import Probe
from longtail.posthoc.probe.inputs import require_finite_rows
from longtail.posthoc.solver import FitResult


class ProbeHead(NewHead):
    """The head of `longtail.Probe` on a frozen backbone that was not trained on these samples.

    Args:
        target_prior: class frequencies to be right for, as in `longtail.Probe`.
        unseen: a class without samples is "never" predicted, or by its "prior".
        tolerance: scaled gradient at the end of a solve, relative to the root of the objective.
        seed: decides the folds.

    Fitted attributes: `weight_` (K, D), `bias_` (K,), `log_target_` (K,), `missing_` (names of classes without
    samples), `estimate_` (what was chosen, and scores of samples that the scoring head had not seen), `result_`.
    """

    needs_every_class = False
    learns_from_seen = False
    reads_logits = False
    for_frozen = True

    def __init__(
        self,
        target_prior: Any = "uniform",
        *,
        unseen: Literal["never", "prior"] = "never",
        tolerance: float = 0.05,
        seed: int = 0,
    ) -> None:
        self.target_prior = target_prior
        self.unseen = unseen
        self.tolerance = tolerance
        self.seed = seed
        self._probe: Probe | None = None

    @classmethod
    def of(cls, probe: Probe) -> Self:
        """The method that fits a `Probe`."""
        settings = probe.get_params()
        settings.pop("classes")  # they are those of the model
        method = cls(**settings)
        method._probe = probe
        return method

    @property
    def probe(self) -> Probe:
        """The fitted estimator."""
        assert self._probe is not None
        return self._probe

    def check_settings(self) -> None:
        choose("unseen", self.unseen, ("never", "prior"))
        number("tolerance", self.tolerance, above=0, below=1)
        whole_number("seed", self.seed, at_least=0)
        if not isinstance(self.target_prior, dict):
            check_target_prior(self.target_prior)

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        features = as_array(require_features(data.features, self))
        require_finite_rows(features)
        if (data.seen_counts > 0).sum() < 2:
            raise UserError("the samples are of one class; Probe needs two classes at least")
        probe = Probe() if self._probe is None else self._probe
        probe.set_params(**self.get_params(deep=False))
        counts = np.where(data.seen_counts > 0, data.class_counts, 0)
        probe.fit_codes(features, data.labels.numpy(), data.classes, counts, data.class_names, data.world)
        self._probe, result = probe, probe.result_
        self.weight_, self.bias_, self.log_target_ = probe.head_.weight, probe.head_.bias, probe.log_target_
        self.missing_ = [data.class_names[label] for label in np.flatnonzero(data.seen_counts == 0)]
        self.estimate_ = asdict(result)
        loss = None if result.balanced is None else result.balanced.nll
        self.result_ = FitResult(result.converged, result.passes, None, result.seconds, loss)

    def notes(self) -> list[str]:
        notes, scores = self.probe.result_.notes(), self.estimate_["balanced"]
        if scores:
            interval = f"{percent(scores['low'])} to {percent(scores['high'])}"
            notes.append(
                f"estimated from {self.estimate_['held_out']:,} samples, each scored by a head that had not seen it: "
                f"balanced accuracy {percent(scores['accuracy'])} % ({interval})"
            )
        if self.missing_:
            how = "never predicted" if self.unseen == "never" else "predicted by their prior alone"
            notes.append(f"no samples of class {some_of(self.missing_)}: {how}")
        return notes

    @property
    def n_parameters_(self) -> int:
        return super().n_parameters_ + 1  # the scale
