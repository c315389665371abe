"""Base classes of the post-hoc methods: scikit-learn estimators on logits.

`fit(logits, y)` or `fit(outputs)`; then `transform` gives calibrated logits, `predict_proba` their softmax and
`predict` the best class. numpy in, numpy out; torch in, torch out. A new method derives from `PostHoc` or
`AffinePostHoc`, declares what it needs in the class attributes below, and checks its settings in `check_settings`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Self, TypeVar, cast, overload

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, OneToOneFeatureMixin, TransformerMixin, clone
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.files.tensors import as_array, single_at_least, writable
from longtail.heads.fold import linear_layer
from longtail.outputs.checks import Array, as_features, as_logits, check_rows, refuse_beside_outputs
from longtail.outputs.record import Outputs
from longtail.posthoc.deployment import DeploymentMixin
from longtail.posthoc.held_out import compared_with_training
from longtail.posthoc.inputs import FitData, as_fit_data
from longtail.posthoc.result_check import check_fit_result
from longtail.posthoc.solver import FitResult
from longtail.posthoc.solver.linear import LinearHead

Method = TypeVar("Method", bound="PostHoc")


class PostHoc(DeploymentMixin, ClassifierMixin, OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """A calibration of a trained classifier's logits.

    Fitted attributes: `classes_`, `n_features_in_` (K), `feature_names_in_` (names of columns, if given), `result_`.
    """

    needs_features: ClassVar[bool] = False
    """Whether it needs the features before the head in addition to the logits."""
    needs_every_class: ClassVar[bool] = True
    """Whether every class must have a sample in the data of the fit."""
    fitted_on_unseen: ClassVar[bool] = False
    """Whether it must be fitted on images the network was not trained on."""
    learns_from_seen: ClassVar[bool] = True
    """Whether its fit depends on the model's predictions on training images."""
    reads_logits: ClassVar[bool] = True
    """Whether its fit uses the model's logits; those of a new, random head are no reason to refuse a method."""
    for_frozen: ClassVar[bool] = False
    """Whether the backbone must not have been trained on the samples of the fit."""
    refuses_seen: ClassVar[bool] = False
    """Whether held-out samples given as arrays are refused, too, if they are training samples."""
    multilabel: ClassVar[bool] = False
    """Whether a sample can have several labels: y is (N, K) of 0 and 1, and probabilities are sigmoids."""
    tuned: ClassVar[tuple[str, ...]] = ()
    """Settings that may be "auto"; the value used is in the attribute of the same name with an underscore."""
    stage_two: ClassVar[dict[str, str]] = {}
    """Settings that the recipe of a data set determines: name here → steps, batch_size or weight_decay."""
    for_balanced_logits: ClassVar[dict[str, Any]] = {}
    """Settings for a network whose training adds the class prior to the logits (balanced softmax and its relatives)."""
    for_frozen_backbone: ClassVar[dict[str, Any]] = {}
    """Settings for a network whose features were never trained on the images (`--train head`)."""
    adds: ClassVar[str] = ""
    """What a method that wraps another adds to it, for titles: "temperature"."""
    wrapped: PostHoc | None = None
    """The method that this one applies, if it wraps or chooses another."""

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
        """Fit on logits (N, K) and labels (N,), or on `Outputs`, which contain everything.

        Args:
            logits: of the training images of the network; for confidence methods, of held-out images.
            y: labels: 0..K-1, or K different names whose alphabetical order is that of the columns.
            class_counts: (K,) training samples per class, if they are not the counts of `y`.
            weight_norms: (K,) norms of the head's class vectors; 1 if omitted.
            head_bias: (K,) bias of the head, for methods that drop it; 0 if omitted.
            features: (N, D) input of the head, for methods that need them.
            validation: held-out `Outputs`, (logits, y) or (logits, y, features), on which hyper-parameters are chosen
                or the method is fitted.
        """
        self.check_settings()
        if isinstance(logits, Outputs) and self.fitted_on_unseen and logits.split == "train":
            raise UserError(
                f"{type(self).__name__} must be fitted on images that the network has not seen, but these are outputs "
                "of the training split; fit on outputs of the validation split"
            )
        arrays = {"weight_norms": weight_norms, "head_bias": head_bias, "features": features}
        data = self._check(logits, y, class_counts=class_counts, **arrays)
        held_out = None
        if validation is not None:
            given = (validation,) if isinstance(validation, Outputs) else validation
            if not isinstance(given, tuple | list) or not 1 <= len(given) <= 3:
                raise UserError("validation must be Outputs, or (logits, y), or (logits, y, features)")
            more = {"features": given[2]} if len(given) == 3 else {}
            held_out = self._check(*given[:2], need_every_class=False, classes=data.classes, **more)
        named = np.empty((0, data.num_classes)) if isinstance(logits, Outputs) else logits
        validate_data(self, named, skip_check_array=True)  # number and names of the columns
        # Arrays may be logits of cross-validation: each is unseen, although a setting is chosen on the same samples.
        is_checked = self.refuses_seen or (isinstance(logits, Outputs) and self.chooses_a_setting)
        if held_out is not None:
            held_out = compared_with_training(data, held_out, refuse=is_checked)
        return self.fit_checked(data, held_out)

    def fit_cross_validated(self, logits: Any, y: Any, **arrays: Any) -> Self:
        """`fit` on cross-validated logits (N, K), each by a model that has not seen its sample: all are held out."""
        self.check_settings()
        data = self._check(logits, y, **arrays)
        validate_data(self, logits, skip_check_array=True)
        return self.fit_checked(data, data)

    def fit_checked(self, data: FitData, validation: FitData | None, *, judge: bool = True) -> Self:
        """Fit on checked input; `judge`: warn of harm, and score the method on held-out samples for a deployment."""
        self.classes_, self.n_features_in_ = data.classes, data.num_classes
        try:
            self._fit(data, validation)
        except np.linalg.LinAlgError as error:
            raise self._not_finite(str(error)) from error
        self._require_finite()
        if judge:
            check_fit_result(self, data, validation)
            self.set_scores_ = self.prior_check_ = None
            if validation is not None:
                self._score_held_out(data, validation)
        return self

    def _require_finite(self) -> None:
        """Refuse a result that is not finite."""
        for name in (name for name in vars(self) if name.endswith("_")):
            value = getattr(self, name)
            for part in value.values() if isinstance(value, dict) else [value]:
                for numbers in vars(part).values() if isinstance(part, LinearHead) else [part]:
                    is_float = isinstance(numbers, np.ndarray | float) and np.asarray(numbers).dtype.kind == "f"
                    # Minus infinity is the shift of a class that a target prior rules out.
                    if is_float and not (np.isneginf(numbers) | (np.abs(numbers) <= np.finfo(np.float32).max)).all():
                        raise self._not_finite(name)

    def _not_finite(self, what: str) -> UserError:
        return UserError(
            f"the fit of {type(self).__name__} gave numbers that are not finite ({what}): logits, class counts "
            "or norms of the head are too large or too small to compute with"
        )

    def check_settings(self) -> None:
        """Refuse invalid settings before the fit."""

    def enough_images(self, num_classes: int) -> int | None:
        """How many training images per class are enough for nearly the same result as all images; None: all."""
        return 1 if self.fitted_on_unseen else None

    def refitted(self, data: FitData, validation: FitData) -> PostHoc:
        """The method fitted with other held-out samples; itself, if only a setting is chosen on them."""
        if not self.needs_validation or self.chooses_a_setting:
            return self
        return unfitted(self).fit_checked(data, validation, judge=False)

    def notes(self) -> list[str]:
        """Sentences about the fit that a user should read."""
        return [] if self.wrapped is None else self.wrapped.notes()

    @property
    def needs_validation(self) -> bool:
        """Whether held-out outputs are needed, to choose a setting or for the fit itself."""
        return self.fitted_on_unseen or self.chooses_a_setting

    @property
    def chooses_a_setting(self) -> bool:
        """Whether a setting is chosen on held-out outputs."""
        return any(getattr(self, name) == "auto" for name in self.tuned)

    @property
    def chosen_(self) -> dict[str, float]:
        """The values of the settings that may be "auto", as they were used."""
        return {name: float(getattr(self, f"{name}_")) for name in self.tuned}

    def _check(self, logits: Any, y: Any = None, **arrays: Any) -> FitData:
        known = {"need_every_class": self.needs_every_class, "check_logits": self.reads_logits}
        return as_fit_data(logits, y, **{**known, **arrays})

    @abstractmethod
    def _fit(self, data: FitData, validation: FitData | None) -> None:
        """Set the fitted attributes."""

    @abstractmethod
    def _apply(self, logits: Tensor, features: Tensor | None) -> Tensor:
        """Calibrated logits (N, K) of logits (N, K) of a floating type."""

    @property
    def n_iter_(self) -> int:
        """Passes over the data, or steps, that the fit took."""
        return self.result_.iterations

    @property
    def n_parameters_(self) -> int:
        """How many numbers the method trained."""
        raise AttributeError(f"{type(self).__name__} has no n_parameters_, the number of trained parameters")

    @overload
    def transform(self, logits: Tensor, features: Any = None) -> Tensor: ...

    @overload
    def transform(self, logits: Outputs | ArrayLike, features: Any = None) -> np.ndarray: ...

    def transform(self, logits: Any, features: Any = None) -> Array:
        """Calibrated logits (N, K), NumPy or torch like the input; some methods also need the features."""
        return self._calibrated(logits, features)

    def _calibrated(self, logits: Any, features: Any) -> Array:
        """The result of `transform`, before `set_output` changes its container."""
        check_is_fitted(self)
        if not isinstance(logits, Outputs | Tensor) and not hasattr(logits, "shape"):
            logits = np.asarray(logits)
        shape = logits.rows().shape if isinstance(logits, Outputs) else logits.shape
        if len(shape) == 2 and shape[1] != self.n_features_in_:
            raise UserError(
                f"X has {shape[1]} features, but {type(self).__name__} is expecting {self.n_features_in_} "
                "features as input: one logit per class it was fitted on"
            )
        if isinstance(logits, Outputs):
            refuse_beside_outputs(features=features)
            rows = logits.rows()
            check_rows(rows)
            inputs = None if logits.features is None else torch.from_numpy(np.array(logits.features)).float()
            return self._apply(rows.read(slice(None)), inputs).numpy()
        array = as_logits(logits)
        validate_data(self, logits, reset=False, skip_check_array=True)  # columns of the same names
        given_tensor = isinstance(logits, Tensor)
        tensor = single_at_least((logits if given_tensor else writable(array)).detach()).contiguous()
        inputs = None if features is None else writable(as_features(features, len(tensor))).to(tensor)
        calibrated = self.apply_finite(tensor, inputs)
        return calibrated if given_tensor else calibrated.numpy()

    def apply_finite(self, logits: Tensor, features: Tensor | None) -> Tensor:
        """Calibrated logits (N, K) of checked tensors; raises where they are too large."""
        calibrated = self._apply(logits, features)
        if not bool((calibrated <= torch.finfo(calibrated.dtype).max).all()):
            raise UserError(f"{type(self).__name__} gives logits that are not finite: these are too large for the fit")
        return calibrated

    @overload
    def predict_proba(self, logits: Tensor, features: Any = None) -> Tensor: ...

    @overload
    def predict_proba(self, logits: Outputs | ArrayLike, features: Any = None) -> np.ndarray: ...

    def predict_proba(self, logits: Any, features: Any = None) -> Array:
        """Probabilities (N, K): the softmax of the calibrated logits; for several labels per sample, their sigmoid."""
        calibrated = self._calibrated(logits, features)
        if isinstance(calibrated, Tensor):
            return self._probabilities(calibrated)
        return self._probabilities(torch.from_numpy(calibrated)).numpy()

    def _probabilities(self, calibrated: Tensor) -> Tensor:
        return calibrated.softmax(1)

    @overload
    def predict(self, logits: Tensor, features: Any = None) -> Tensor: ...

    @overload
    def predict(self, logits: Outputs | ArrayLike, features: Any = None) -> np.ndarray: ...

    def predict(self, logits: Any, features: Any = None) -> Array:
        """The most probable class of each sample, by the name given in `fit`; names are always an array."""
        best = self._calibrated(logits, features).argmax(1)
        if isinstance(best, Tensor) and self.classes_.dtype.kind in "iu":
            return torch.as_tensor(self.classes_, device=best.device)[best]
        return self.classes_[as_array(best)]

    def score(self, logits: Any, y: Any = None, sample_weight: Any = None, features: Any = None) -> float:
        """Accuracy on logits (N, K) with labels (N,), or on `Outputs`."""
        from sklearn.metrics import accuracy_score  # slow to import

        labels = logits.labels if y is None and isinstance(logits, Outputs) else y
        return float(accuracy_score(labels, np.asarray(self.predict(logits, features)), sample_weight=sample_weight))

    def head(self, linear: nn.Linear) -> nn.Module:
        """A layer that replaces the last layer of the classifier and returns the calibrated logits."""
        weight, bias = self.fold(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
        return linear_layer(weight, bias).requires_grad_(is_trained(linear))

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weight (K, D) and bias (K,) of the linear head that returns the calibrated logits."""
        raise UserError(f"{type(self).__name__} does not fold into a linear head")


def is_trained(layer: nn.Module) -> bool:
    """Whether any parameter of a layer requires a gradient."""
    return any(parameter.requires_grad for parameter in layer.parameters())


def unfitted(method: Method) -> Method:
    """A copy of a method with the same settings, not fitted."""
    return cast("Method", clone(method))
