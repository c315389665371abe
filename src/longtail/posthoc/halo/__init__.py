"""HALO, held-out adjusted logits: a stack of linear heads mixed on unseen images, for any target distribution.

A network has seen its training images, so a fit on them corrects too little. HALO fits five coefficients by
likelihood on a few images that the network has not seen:

    logits = A eta + l1 (LDA - eta) + l2 (Q - eta) + c log pi + v z(log |W_j|) + log q - log(pi) / 2

eta are the model's logits, LDA and Q are linear heads on its features (see `heads`), pi the training prior,
z the standardised log norms of the class vectors. The fit is a posterior at the prior pi^(1/2); the
last two terms move it to a target prior q: uniform for balanced recognition, pi for recognition as in
training, or that of a deployment. All of it is linear in the features: it folds into one `nn.Linear`.
Without features, A, c and v are fitted. If the model's logits are right for equal classes (balanced softmax and
its relatives), eta is these logits plus log pi.

No paper: the method was developed for this library; its measurements are in docs/results/halo.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from longtail.errors import UserError, choose, number, whole_number
from longtail.files.text import some_of
from longtail.outputs.checks import Array
from longtail.outputs.rows import LogitRows
from longtail.posthoc.base import PostHoc
from longtail.posthoc.halo.heads import stack_heads
from longtail.posthoc.halo.mixture import LARGEST_SCORE, SMALLEST_SCORE, Mixture
from longtail.posthoc.halo.unseen import (
    ScoredSamples,
    Scores,
    cross_fit,
    fold_scores,
    mean_loss,
    model_scores,
    refit_heads,
)
from longtail.posthoc.held_out import HOW_TO_HOLD_OUT
from longtail.posthoc.inputs import FitData, require_features
from longtail.posthoc.priors import (
    ModelPrior,
    check_target_prior,
    detect_model_prior,
    log_target,
    sample_weights,
    shifted,
    shifted_head,
)
from longtail.posthoc.solver import FitResult
from longtail.posthoc.solver.linear import SINGLE_PRECISION, LinearHead, class_statistics

CACHED_SCORES = 1 << 28  # of held-out samples, 1 GB; more are computed again in every pass
SUBSAMPLE = 500  # held-out samples on which the coefficients are solved first
HEADS = "a mixture of three heads"
FEW_SAMPLES = 50  # held-out samples; from fewer the coefficients learn little


class HALO(PostHoc):
    """Held-out adjusted logits.

    Args:
        target_prior: class frequencies to be right for: "uniform" (balanced recognition), "train" (as in training),
            a power of the training prior (1 is "train", 0 is "uniform"), weights or counts (K,), or a CSV file of
            class,weight; a class of weight 0 is never predicted. `with_target_prior` changes it later.
        held_out: "validation": the coefficients are fitted on the held-out outputs given as `validation`. "cross-fit":
            for a frozen backbone that was not trained on these images (a linear probe): the heads are fitted anew in
            folds, and the coefficients on the samples each fold left out. The model's head is fitted anew, too, in the
            folds and then on all samples, and its logits replace those of the model: features are needed to predict.
            This is never assumed; you must say so. On frozen features prefer `longtail.Probe`: it needs no head.
        model_prior: class frequencies that the model's logits are right for: "train" (trained by cross-entropy on
            images as they come), "uniform" (balanced softmax, logit-adjusted or re-weighted training, logits that
            were adjusted before), or "auto": the one that explains the training outputs better.
        tolerance: largest entry of the gradient of the balanced head at the end, relative to the start.
        seed: random seed of the folds.

    Fitted attributes: `numbers_` (coefficients by name), `heads_` (the stack, empty without features), `model_head_`
    (the model's head fitted anew on all samples if cross-fitted, else None), `log_prior_` (K,), `log_target_` (K,),
    `log_norms_` (K,) standardised, `held_out_` (where unseen samples came from), `missing_` (classes without an unseen
    sample), `model_prior_` ("train" or "uniform"), `result_`.

    >>> rng = np.random.default_rng(0)
    >>> y = np.repeat([0, 1], [90, 10])
    >>> logits = rng.normal(size=(100, 2)) + np.eye(2)[y] + [1.0, -1.0]
    >>> halo = HALO().fit(logits[::2], y[::2], validation=(logits[1::2], y[1::2]))
    >>> halo.held_out_
    'logits alone; 50 held-out samples'
    """

    log_target_: np.ndarray

    learns_from_seen = False
    for_balanced_logits: ClassVar[dict[str, Any]] = {"model_prior": "uniform"}
    for_frozen_backbone: ClassVar[dict[str, Any]] = {"held_out": "cross-fit"}

    def __init__(
        self,
        target_prior: Any = "uniform",
        *,
        held_out: Literal["validation", "cross-fit"] = "validation",
        model_prior: Literal["auto", "train", "uniform"] = "auto",
        tolerance: float = 1e-3,
        seed: int = 0,
    ) -> None:
        self.target_prior = target_prior
        self.held_out = held_out
        self.model_prior = model_prior
        self.tolerance = tolerance
        self.seed = seed

    def check_settings(self) -> None:
        choose("held_out", self.held_out, ("validation", "cross-fit"))
        choose("model_prior", self.model_prior, ("auto", "train", "uniform"))
        number("tolerance", self.tolerance, above=0)
        whole_number("seed", self.seed, at_least=0)
        check_target_prior(self.target_prior)

    @property
    def needs_validation(self) -> bool:
        return self.held_out == "validation"

    @property
    def refuses_seen(self) -> bool:  # type: ignore[override]
        return self.needs_validation

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        self.log_prior_ = np.log(data.class_counts / data.class_counts.sum())
        self.class_names_ = data.class_names
        self._set_target(self.target_prior)  # invalid values are refused before anything is computed
        norms = np.log(data.weight_norms)
        self.log_norms_ = (norms - norms.mean()) / norms.std() if np.ptp(norms) > 1e-9 else np.zeros(len(norms))
        self.heads_: dict[str, LinearHead] = {}
        self.model_head_: LinearHead | None = None
        if self.held_out == "validation" and validation is None:
            raise UserError(
                f"HALO is fitted on images that the network has not seen, but there are none: {HOW_TO_HOLD_OUT}"
            )
        self.model_prior_: ModelPrior = detect_model_prior(data) if self.model_prior == "auto" else self.model_prior
        if validation is None or self.held_out == "cross-fit":
            self._cross_fit(self._at_train_prior(data))
            return
        if data.features is not None and validation.features is not None:
            self.heads_ = self._stack(self._at_train_prior(data), data.features)
        self._fit_numbers(self.mixture(data, validation))
        kind, size = HEADS if self.heads_ else "logits alone", len(validation.labels)
        self._describe(f"{kind}; {size} held-out samples", size, data)

    def _at_train_prior(self, data: FitData) -> FitData:
        """The samples with logits that are right for the training prior."""
        return data.plus(self.log_prior_) if self.model_prior_ == "uniform" else data

    def _cross_fit(self, data: FitData) -> None:
        features = require_features(data.features, self)
        build_heads = partial(stack_heads, tolerance=self.tolerance)
        folds = cross_fit(data, features, build_heads, seed=self.seed)
        self.model_head_, self.heads_ = refit_heads(data, features, data.labels, mean_loss(data), build_heads)
        order = np.concatenate([fold.left_out for fold in folds])
        scores = partial(fold_scores, folds, LogitRows(features), data.world)
        self._fit_numbers(self._problem(scores, data.labels.numpy()[order], data))
        source = f"{HEADS}; cross-fitted in {len(folds)} folds on {len(order)} samples"
        self._describe(source, len(order), data)

    def _stack(self, data: FitData, features: Array) -> dict[str, LinearHead]:
        statistics = class_statistics(features, data.labels, data.num_classes, data.world)
        return stack_heads(data, features, statistics, self.tolerance)

    def _describe(self, source: str, size: int, data: FitData) -> None:
        if size < FEW_SAMPLES:
            source = f"{source} (few: the numbers, and so the confidence, stay near those usual for networks)"
        if len(self.missing_):
            source = f"{source}, none of class {some_of([data.class_names[c] for c in self.missing_])}"
        self.held_out_ = source

    def mixture(self, train: FitData, held_out: FitData) -> Mixture:
        """The problem of mixing the fitted heads on held-out samples."""
        scores = partial(model_scores, self._at_train_prior(held_out), self.heads_)
        return self._problem(scores, held_out.labels.numpy(), train)

    def _fit_numbers(self, problem: Mixture) -> None:
        solution = problem.solve(exact=self._exact)
        if not np.isfinite([solution.value, *solution.x]).all():
            raise UserError("HALO's numbers are not finite: logits or features are too large to compute with")
        if not solution.converged:
            warnings.warn(f"HALO: not solved in {solution.evaluations} passes", ConvergenceWarning, stacklevel=2)
        self.numbers_ = dict(zip(problem.names, solution.x.tolist(), strict=True))
        self.result_ = FitResult.of(solution)

    @property
    def _exact(self) -> bool:
        return self.tolerance < SINGLE_PRECISION

    def _problem(self, scores: Scores, labels: np.ndarray, train: FitData) -> Mixture:
        """The mixture on unseen samples; its softmax is over the classes that have any."""
        counts = np.bincount(labels, minlength=train.num_classes)
        present, self.missing_ = np.flatnonzero(counts > 0), np.flatnonzero(counts == 0)
        if len(present) < 2:
            raise UserError(f"the held-out samples are of {len(present)} class; HALO needs two classes at least")
        weights = torch.from_numpy(sample_weights(labels, train.class_counts))
        columns, codes = torch.from_numpy(present), torch.from_numpy(np.searchsorted(present, labels))

        def batches() -> Iterator[ScoredSamples]:
            for rows, read in scores():
                block = read(torch.float64 if self._exact else torch.float32)
                if not SMALLEST_SCORE < block.abs().amax() < LARGEST_SCORE:
                    block = read(torch.float64)
                block = block if len(self.missing_) == 0 else block[:, columns]
                yield from ScoredSamples.from_scores(codes[rows], weights[rows], block).blocks()

        fits_in_memory = (1 + len(self.heads_)) * len(labels) * len(present) <= CACHED_SCORES * train.world.size
        cached = list(batches()) if fits_in_memory else None
        class_vectors = {"prior": self.log_prior_, **({"norms": self.log_norms_} if self.log_norms_.any() else {})}
        return Mixture(
            ["model", *self.heads_, *class_vectors],
            batches if cached is None else lambda: cached,
            torch.from_numpy(np.stack(list(class_vectors.values()))[:, present]),
            train.world,
            extrapolated=len(self.missing_) > 0,
            subsampling=max(len(labels) // SUBSAMPLE, 1),
        )

    def refitted(self, data: FitData, validation: FitData) -> Self:
        """The same heads with coefficients fitted on other held-out samples."""
        changed = copy.copy(self)
        changed._fit_numbers(changed.mixture(data, validation))
        return changed

    def notes(self) -> list[str]:
        notes = [f"fitted: {self.held_out_}"]
        if self.model_prior_ == "uniform":
            notes.append(
                "the model's own logits are right for equal classes already, so the training prior is added to them "
                "first (--options model-prior train if they are not)"
            )
        return notes

    def with_target_prior(self, target_prior: Any) -> Self:
        """The same fit for another target prior; nothing is fitted again."""
        check_is_fitted(self)
        changed = copy.copy(self)
        changed._set_target(target_prior)
        return changed

    def _set_target(self, target_prior: Any) -> None:
        check_target_prior(target_prior)
        self.target_prior = target_prior
        self.log_target_ = log_target(target_prior, self.log_prior_, self.class_names_)

    @property
    def _shift(self) -> np.ndarray:
        """(K,) the shift that is added to the mixed scores."""
        numbers = self.numbers_
        # A head fitted anew is right for the training prior already.
        added = self._model_factor if self.model_prior_ == "uniform" and self.model_head_ is None else 0.0
        shift = (added + numbers["prior"] - 0.5) * self.log_prior_ + numbers.get("norms", 0.0) * self.log_norms_
        return np.asarray(shift + self.log_target_)

    @property
    def _model_factor(self) -> float:
        """The factor of the model's logits."""
        return self.numbers_["model"] - sum(self.numbers_[name] for name in self.heads_)

    def _apply(self, logits: Tensor, features: Tensor | None) -> Tensor:
        if not self.heads_:
            return shifted(self._model_factor * logits, self._shift)
        width = next(iter(self.heads_.values())).weight.shape[1]
        inputs = torch.as_tensor(require_features(features, self, width)).to(logits)
        mixed = self._model_factor * (logits if self.model_head_ is None else self.model_head_.scores(inputs))
        for name, head in self.heads_.items():
            mixed = mixed + self.numbers_[name] * head.scores(inputs)
        return shifted(mixed, self._shift)

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        check_is_fitted(self)
        old = (weight.cpu(), torch.zeros(len(weight)) if bias is None else bias.cpu())
        if self.model_head_ is not None:
            old = (torch.from_numpy(self.model_head_.weight), torch.from_numpy(self.model_head_.bias))
        folded, offset = (self._model_factor * values.double() for values in old)
        for name, head in self.heads_.items():
            folded = folded + self.numbers_[name] * torch.from_numpy(head.weight)
            offset = offset + self.numbers_[name] * torch.from_numpy(head.bias)
        folded, offset = shifted_head(folded, offset, self._shift)
        return folded.to(weight.dtype).to(weight.device), offset.to(weight.dtype).to(weight.device)

    @property
    def n_parameters_(self) -> int:
        """The coefficients, the balanced head, and the model's head if cross-fitted; covariances are not trained."""
        trained = [head for head in (self.heads_.get("balanced"), self.model_head_) if head is not None]
        return len(self.numbers_) + sum(head.weight.size + head.bias.size for head in trained)
