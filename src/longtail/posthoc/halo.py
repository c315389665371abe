"""HALO, held-out adjusted logits: a stack of linear heads mixed on unseen images, for any target distribution.

A network has seen its training images, so a fit on them corrects too little. Five numbers fitted by
likelihood on a few images it has not seen say how far each of three linear heads is to be believed:

    logits = A eta + l1 (LDA - eta) + l2 (Q - eta) + c log pi + v z(log |W_j|) + log q - log(pi) / 2

eta is the model's own head, LDA and Q are heads on its features (see `heads`), pi the training prior,
z the standardised log norms of the class vectors. The fit is a posterior at the prior pi^(1/2); the
last two terms move it to a target prior q: uniform for balanced recognition, pi for recognition as in
training, any other for a deployment's own classes. All of it is linear in the features: it folds into
one `nn.Linear`. Where only logits are known, A, c and v are fitted. Where the model's own logits are
right for equal classes (balanced softmax and its relatives), eta is these logits plus log pi.

Our own method; the measurements stand in docs/results/halo.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from longtail.core.text import some_of
from longtail.errors import UserError, choose, number, whole_number
from longtail.outputs.checks import Array
from longtail.outputs.rows import LogitRows
from longtail.posthoc.base import PostHoc
from longtail.posthoc.class_statistics import class_statistics
from longtail.posthoc.cross_fit import cross_fit
from longtail.posthoc.crt import require_features
from longtail.posthoc.heads import stack_heads
from longtail.posthoc.held import Held, sample_weights
from longtail.posthoc.held_scores import Scores, fold_scores, model_scores
from longtail.posthoc.inputs import FitData
from longtail.posthoc.linear import SINGLE_PRECISION, LinearHead
from longtail.posthoc.model_prior import ModelPrior, find_model_prior
from longtail.posthoc.result import FitResult
from longtail.posthoc.stack import LARGEST, SMALLEST, Stack
from longtail.posthoc.target_prior import check_target_prior, log_target, shifted, shifted_head
from longtail.posthoc.unseen import require_unseen

REMEMBERED = 1 << 28  # scores of held-out samples, 1 GB; more are computed again in every pass
ENOUGH = 500  # held-out samples that lead the numbers near their solution on all of them
FEW = 50  # held-out samples; from fewer the five numbers learn little

WAYS = (
    "hold out a part of the training images (longtail train --validation 0.1; or --validation 0.02 --validation-from "
    "head, which costs the tail nothing), pass held-out outputs (validation=, --validation FILE), or, if the backbone "
    'was never trained on these images, HALO(held_out="cross-fit") (--method halo --options held-out cross-fit)'
)


class HALO(PostHoc):
    """Held-out adjusted logits.

    Args:
        target_prior: class frequencies to be right for: "uniform" (balanced recognition), "train" (as in training),
            a power of the training prior (1 is "train", 0 is "uniform"), weights or counts (K,), or a CSV file of
            class,weight; a class of weight 0 is never predicted.
            `with_target_prior` changes it later.
        held_out: "validation": the numbers are fitted on the held-out outputs given as `validation`. "cross-fit":
            for a frozen backbone that was not trained on these images (a linear probe): the heads are fitted anew in
            folds, and the numbers on the samples each fold left out. Only you can know that; it is never assumed.
        model_prior: class frequencies that the model's own logits are right for: "train" (trained by cross-entropy on
            images as they come), "uniform" (balanced softmax, logit-adjusted or re-weighted training, logits that
            were adjusted before), or "auto": the one that explains the training outputs better.
        tolerance: largest entry of the gradient of the balanced head at the end, relative to the start.
        seed: decides the folds.

    Fitted attributes: `numbers_` (by name), `heads_` (the stack, empty where only logits are known), `log_prior_`
    (K,), `log_target_` (K,), `log_norms_` (K,) standardised, `held_out_` (where unseen samples came from), `missing_`
    (classes without an unseen sample), `model_prior_` ("train" or "uniform"), `result_`.

    >>> rng = np.random.default_rng(0)
    >>> y = np.repeat([0, 1], [90, 10])
    >>> logits = rng.normal(size=(100, 2)) + np.eye(2)[y] + [1.0, -1.0]
    >>> halo = HALO().fit(logits[::2], y[::2], validation=(logits[1::2], y[1::2]))
    >>> halo.held_out_
    'logits alone; 50 held-out samples'
    """

    learns_from_seen = False

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

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        self.log_prior_ = np.log(data.class_counts / data.class_counts.sum())
        self.class_names_ = data.class_names
        self._set_target(self.target_prior)  # invalid values are refused before anything is computed
        norms = np.log(data.weight_norms)
        self.log_norms_ = (norms - norms.mean()) / norms.std() if np.ptp(norms) > 1e-9 else np.zeros(len(norms))
        self.heads_: dict[str, LinearHead] = {}
        if self.held_out == "validation":
            if validation is None:
                raise UserError(f"HALO is fitted on images that the network has not seen, but there are none: {WAYS}")
            require_unseen(data, validation)
        self.model_prior_: ModelPrior = find_model_prior(data) if self.model_prior == "auto" else self.model_prior
        if validation is None or self.held_out == "cross-fit":
            self._cross_fit(self._as_usual(data))
            return
        if data.features is not None and validation.features is not None:
            self.heads_ = self._stack(self._as_usual(data), data.features)
        self._fit_numbers(self.mixture(data, validation))
        kind = "a stack of heads" if self.heads_ else "logits alone"
        number = len(validation.labels)
        self._describe(f"{kind}; {number} held-out samples", number, data)

    def _as_usual(self, data: FitData) -> FitData:
        """Samples with logits that are right for the training prior, as those of most models are."""
        return data.plus(self.log_prior_) if self.model_prior_ == "uniform" else data

    def _cross_fit(self, data: FitData) -> None:
        features = require_features(data.features, self)
        folds = cross_fit(data, features, partial(stack_heads, tolerance=self.tolerance), seed=self.seed)
        self.heads_ = self._stack(data, features)
        order = np.concatenate([fold.held for fold in folds])
        scores = partial(fold_scores, folds, LogitRows(features), data.world)
        self._fit_numbers(self._problem(scores, data.labels.numpy()[order], data))
        self._describe(
            f"a stack of heads; cross-fitted in {len(folds)} folds on {len(order)} samples", len(order), data
        )

    def _stack(self, data: FitData, features: Array) -> dict[str, LinearHead]:
        statistics = class_statistics(features, data.labels, data.num_classes, data.world)
        return stack_heads(data, features, statistics, self.tolerance)

    def _describe(self, way: str, number: int, data: FitData) -> None:
        if number < FEW:
            way = f"{way} (few: the numbers, and so the confidence, stay near those usual for networks)"
        self.held_out_ = way
        if len(self.missing_):
            self.held_out_ = f"{way}, none of class {some_of([data.class_names[c] for c in self.missing_])}"

    def mixture(self, train: FitData, held_out: FitData) -> Stack:
        """The problem of mixing the fitted heads on held-out samples."""
        scores = partial(model_scores, self._as_usual(held_out), self.heads_)
        return self._problem(scores, held_out.labels.numpy(), train)

    def _fit_numbers(self, problem: Stack) -> None:
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

    def _problem(self, scores: Scores, labels: np.ndarray, train: FitData) -> Stack:
        """The mixture on unseen samples; its softmax is over the classes that have any."""
        own = np.bincount(labels, minlength=train.num_classes)
        present, self.missing_ = np.flatnonzero(own > 0), np.flatnonzero(own == 0)
        if len(present) < 2:
            raise UserError(f"the held-out samples are of {len(present)} class; HALO needs two classes at least")
        weights = torch.from_numpy(sample_weights(labels, train.class_counts))
        place = np.full(train.num_classes, -1)
        place[present] = np.arange(len(present))
        codes, columns = torch.from_numpy(place[labels]), torch.from_numpy(present)

        def held() -> Iterator[Held]:
            for rows, read in scores():
                found = read(torch.float64 if self._exact else torch.float32)
                if not SMALLEST < found.abs().amax() < LARGEST:
                    found = read(torch.float64)
                found = found if len(self.missing_) == 0 else found[:, columns]
                yield from Held.of(codes[rows], weights[rows], found).blocks()

        stored = (1 + len(self.heads_)) * len(labels) * len(present) <= REMEMBERED * train.world.size
        kept = list(held()) if stored else None
        known = {"prior": self.log_prior_, **({"norms": self.log_norms_} if self.log_norms_.any() else {})}
        vectors = torch.from_numpy(np.stack(list(known.values()))[:, present])
        names = ["model", *self.heads_, *known]
        passes = held if kept is None else lambda: kept
        every = max(len(labels) // ENOUGH, 1)
        return Stack(names, passes, vectors, train.world, extrapolated=len(self.missing_) > 0, every=every)

    def refitted(self, train: FitData, held_out: FitData) -> Self:
        """The same heads with numbers fitted on other held-out samples."""
        changed = copy.copy(self)
        changed._fit_numbers(changed.mixture(train, held_out))
        return changed

    def with_target_prior(self, target_prior: Any) -> Self:
        """The same fit for another distribution of classes; nothing is fitted again."""
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
        own = self._own_factor if self.model_prior_ == "uniform" else 0.0
        shift = (own + numbers["prior"] - 0.5) * self.log_prior_ + numbers.get("norms", 0.0) * self.log_norms_
        return np.asarray(shift + self.log_target_)

    @property
    def _own_factor(self) -> float:
        """The factor of the model's own logits."""
        return self.numbers_["model"] - sum(self.numbers_[name] for name in self.heads_)

    def _apply(self, logits: Tensor, features: Tensor | None) -> Tensor:
        mixed = self._own_factor * logits
        if self.heads_:
            width = next(iter(self.heads_.values())).weight.shape[1]
            inputs = torch.as_tensor(require_features(features, self, width)).to(logits)
            for name, head in self.heads_.items():
                mixed = mixed + self.numbers_[name] * head.scores(inputs)
        return shifted(mixed, self._shift)

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        check_is_fitted(self)
        old = torch.zeros(len(weight)) if bias is None else bias.cpu()
        folded, offset = self._own_factor * weight.cpu().double(), self._own_factor * old.double()
        for name, head in self.heads_.items():
            folded = folded + self.numbers_[name] * torch.from_numpy(head.weight)
            offset = offset + self.numbers_[name] * torch.from_numpy(head.bias)
        folded, offset = shifted_head(folded, offset, self._shift)
        return folded.to(weight.dtype).to(weight.device), offset.to(weight.dtype).to(weight.device)

    @property
    def n_parameters_(self) -> int:
        """The mixed numbers, and those of the balanced head; means and covariance are not trained."""
        trained = self.heads_["balanced"] if self.heads_ else None
        return len(self.numbers_) + (0 if trained is None else trained.weight.size + trained.bias.size)
