"""What every post-hoc method shares: the scikit-learn shape on logits.

`fit(logits, y)` or `fit(outputs)`; then `transform` gives repaired logits, `predict_proba` their
softmax and `predict` the best class. numpy in, numpy out; torch in, torch out.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, OneToOneFeatureMixin, TransformerMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from longtail.core.arrays import as_array, single_at_least, writable
from longtail.errors import UserError, choose, number, whole_number
from longtail.networks.head import linear_layer
from longtail.outputs.checks import Array, as_features, as_logits, check_rows, refuse_beside_outputs
from longtail.outputs.record import Outputs
from longtail.posthoc.inputs import FitData, from_arrays, from_outputs
from longtail.posthoc.solver import Solution

CHOICES = {
    "solver": ("exact", "sgd"),
    "divide_by": ("batch", "weights"),
    "ridge_centre": ("zero", "identity"),
    "form": ("paper", "release"),
}


@dataclass(frozen=True)
class FitResult:
    """How a fit ended."""

    converged: bool
    iterations: int
    gradient: float | None
    seconds: float
    value: float | None = None

    @classmethod
    def of(cls, solution: Solution) -> FitResult:
        return cls(solution.converged, solution.evaluations, solution.gradient, solution.seconds, solution.value)

    @classmethod
    def closed_form(cls) -> FitResult:
        """Nothing had to be searched for."""
        return cls(converged=True, iterations=0, gradient=None, seconds=0.0)


class PostHoc(ClassifierMixin, OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """A repair of a trained classifier's logits.

    Fitted attributes: `classes_`, `n_features_in_` (the number of classes), `feature_names_in_` (of a
    table whose columns have names), `result_`.
    """

    result_: FitResult

    def fit(
        self,
        logits: Any,
        y: Any = None,
        *,
        class_counts: Any = None,
        weight_norms: Any = None,
        head_bias: Any = None,
        features: Any = None,
        validation: Any = None,
    ) -> Self:
        """Fit on logits (N, K) and labels (N,), or on `Outputs`, which hold the rest too.

        Args:
            logits: of images the model was trained on.
            y: labels: 0..K-1, or K different names whose alphabetical order is that of the columns.
            class_counts: (K,) training samples per class, if they are not the counts of `y`.
            weight_norms: (K,) norms of the head's class vectors; 1 if omitted.
            head_bias: (K,) bias of the head, for methods that drop it; 0 if omitted.
            features: (N, D) that the head sees, for methods that need them.
            validation: held-out `Outputs` or (logits, y), for settings chosen on them.
        """
        self.check_settings()
        known = {"weight_norms": weight_norms, "head_bias": head_bias, "features": features}
        data = self._check(logits, y, class_counts=class_counts, **known)
        held_out = None
        if validation is not None:
            given = (validation,) if isinstance(validation, Outputs) else validation
            if not isinstance(given, tuple | list) or len(given) > 2:
                raise UserError("validation must be Outputs or a pair (logits, y)")
            held_out = self._check(*given, need_every_class=False, classes=data.classes)
            if held_out.num_classes != data.num_classes:
                raise UserError(f"{data.num_classes} classes to fit on, {held_out.num_classes} in validation")
        self.classes_ = data.classes
        named = np.empty((0, data.num_classes)) if isinstance(logits, Outputs) else logits
        validate_data(self, named, skip_check_array=True)  # number and names of the columns
        self._fit(data, held_out)
        return self

    def check_settings(self) -> None:
        """Refuse settings that cannot be, before anything is fitted; here those that several methods have."""
        for name, value in self.get_params(deep=False).items():
            if name in ("ridge", "weight_decay"):
                number(name, value, at_least=0)
            elif name in ("tolerance", "lr"):
                number(name, value, above=0)
            elif name in ("max_iter", "batch_size") and value is not None:
                whole_number(name, value)
            elif name == "seed":
                whole_number(name, value, at_least=0)
            elif name in CHOICES:
                choose(name, value, CHOICES[name])

    def _check(
        self,
        logits: Any,
        y: Any = None,
        *,
        need_every_class: bool = True,
        classes: np.ndarray | None = None,
        **known: Any,
    ) -> FitData:
        if isinstance(logits, Outputs):
            refuse_beside_outputs(y=y, **known)
            return from_outputs(logits, need_every_class=need_every_class)
        return from_arrays(logits, y, need_every_class=need_every_class, classes=classes, **known)

    @abstractmethod
    def _fit(self, data: FitData, validation: FitData | None) -> None:
        """Set the fitted attributes."""

    @abstractmethod
    def _apply(self, logits: Tensor, features: Tensor | None) -> Tensor:
        """Repair logits (N, K) of a floating type."""

    @property
    def n_iter_(self) -> int:
        """Passes over the data, or steps, that the fit took."""
        return self.result_.iterations

    @property
    def n_parameters_(self) -> int:
        """How many numbers the method trained."""
        raise AttributeError(f"{type(self).__name__} does not say how many numbers it trains")

    def transform(self, logits: Any, features: Any = None) -> Array:
        """Repaired logits (N, K), of the same kind as the input; some methods need the features too."""
        return self._repair(logits, features)

    def _repair(self, logits: Any, features: Any) -> Array:
        """What `transform` gives, whatever container `set_output` asks of that."""
        check_is_fitted(self)
        if isinstance(logits, Outputs):
            refuse_beside_outputs(features=features)
            rows = logits.rows()
            self._require_width(rows.shape[1])
            check_rows(rows)
            inputs = None if logits.features is None else torch.from_numpy(np.array(logits.features)).float()
            return self._apply(rows.read(slice(None)), inputs).numpy()
        array = as_logits(logits)
        self._require_width(array.shape[1])
        validate_data(self, logits, reset=False, skip_check_array=True)  # columns of the same names
        given_tensor = isinstance(logits, Tensor)
        tensor = single_at_least((logits if given_tensor else writable(array)).detach())
        inputs = None if features is None else writable(as_features(features, len(tensor))).to(tensor)
        repaired = self._apply(tensor, inputs)
        return repaired if given_tensor else repaired.numpy()

    def _require_width(self, columns: int) -> None:
        if columns != self.n_features_in_:
            raise UserError(
                f"X has {columns} features, but {type(self).__name__} is expecting {self.n_features_in_} "
                "features as input: one logit per class it was fitted on"
            )

    def predict_proba(self, logits: Any, features: Any = None) -> Array:
        """Probabilities (N, K) after repair."""
        repaired = self._repair(logits, features)
        if isinstance(repaired, Tensor):
            return self._probabilities(repaired)
        return self._probabilities(torch.from_numpy(repaired)).numpy()

    def _probabilities(self, repaired: Tensor) -> Tensor:
        return repaired.softmax(1)

    def predict(self, logits: Any, features: Any = None) -> Array:
        """The most probable class of each sample, by the name given in `fit`."""
        best = self._repair(logits, features).argmax(1)
        if isinstance(best, Tensor) and self.classes_.dtype.kind in "iu":
            return torch.as_tensor(self.classes_, device=best.device)[best]
        return self.classes_[as_array(best)]

    def score(self, logits: Any, y: Any = None, sample_weight: Any = None, features: Any = None) -> float:
        """Accuracy on logits (N, K) with labels (N,), or on `Outputs`."""
        truth = logits.labels if y is None and isinstance(logits, Outputs) else y
        return float(accuracy_score(truth, np.asarray(self.predict(logits, features)), sample_weight=sample_weight))

    def head(self, linear: nn.Linear) -> nn.Module:
        """A layer that takes the place of the classifier's last one and gives the repaired logits."""
        weight, bias = self.fold(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
        return linear_layer(weight, bias).requires_grad_(is_trained(linear))

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weight (K, D) and bias (K,) of the linear head that gives the repaired logits by itself."""
        raise UserError(f"{type(self).__name__} does not fold into a linear head")


def is_trained(layer: nn.Module) -> bool:
    """Whether any parameter of a layer takes a gradient."""
    return any(parameter.requires_grad for parameter in layer.parameters())


class AffinePostHoc(PostHoc):
    """Methods whose repair is a scale and a shift per class: they fold into the head.

    Subclasses set `scale_` (K,) and `shift_` (K,): repaired logits are `scale_ * logits + shift_`.
    """

    scale_: np.ndarray
    shift_: np.ndarray

    def _apply(self, logits: Tensor, features: Tensor | None) -> Tensor:
        scale, shift = (torch.as_tensor(v).to(logits.dtype).to(logits.device) for v in (self.scale_, self.shift_))
        return logits * scale + shift

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        check_is_fitted(self)
        # On the CPU, because not every device computes in float64.
        scale, shift = (torch.as_tensor(v).double() for v in (self.scale_, self.shift_))
        old = torch.zeros(len(weight)) if bias is None else bias.cpu()
        folded = scale.unsqueeze(1) * weight.cpu().double(), scale * old.double() + shift
        return folded[0].to(weight.dtype).to(weight.device), folded[1].to(weight.dtype).to(weight.device)
