"""Calibrates any model with its loader: extract, fit, fold the result into the head, or attach it after the model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, cast, overload

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from longtail.distributed import World
from longtail.errors import UserError
from longtail.files.progress import Display
from longtail.files.tensors import random_state_kept
from longtail.heads.attach import Attached, ScaleShift, one_logit
from longtail.heads.find import EXACT, MULTI_LABEL, SINGLE_LABEL, Head
from longtail.heads.fold import folded_layers, folded_to_one_row, gathered, linear_layer, unwrap, with_layers
from longtail.methods import build_posthoc
from longtail.outputs.batches import split_batch
from longtail.outputs.extract import Source
from longtail.outputs.inference import InferenceSession, forward, inference_session
from longtail.outputs.loaders import listed_labels
from longtail.outputs.record import Header, Outputs
from longtail.posthoc.affine import AffinePostHoc
from longtail.posthoc.base import PostHoc
from longtail.posthoc.gate import warn
from longtail.posthoc.halo import HALO
from longtail.posthoc.inputs import TOO_SURE, chosen_images, fit_outputs, warn_if_no_errors
from longtail.posthoc.marc import MARC
from longtail.posthoc.priors import NEVER
from longtail.posthoc.probe.estimator import Probe
from longtail.posthoc.probe.method import ProbeHead

if TYPE_CHECKING:
    from longtail.runs.folder import Run

ATTACH = "method.fit(longtail.extract(model, loader)); model = longtail.attach(model, method)"
MULTI_LABEL_ATTACH = "method.fit(logits, labels); model = longtail.attach(model, method, batch=batch)"

Model = TypeVar("Model", bound=nn.Module)
Estimator = TypeVar("Estimator", bound=PostHoc | Probe)


class Options(TypedDict, total=False):
    """Arguments of `calibrate` that do not change the type of its result."""

    head: str | None
    class_counts: Any
    device: str
    images_per_class: int | Literal["all", "auto"]
    seed: int
    progress: bool


@overload
def calibrate(
    model: Model, loader: Any, method: None = None, *, validation: None = None, **options: Unpack[Options]
) -> tuple[Model, MARC]: ...


@overload
def calibrate(
    model: Model, loader: Any, method: None = None, *, validation: Any, **options: Unpack[Options]
) -> tuple[Model, HALO]: ...


@overload
def calibrate(
    model: Model, loader: Any, method: Estimator, *, validation: Any = None, **options: Unpack[Options]
) -> tuple[Model, Estimator]: ...


@overload
def calibrate(
    model: Model, loader: Any, method: str, *, validation: Any = None, **options: Unpack[Options]
) -> tuple[Model, PostHoc]: ...


def calibrate(
    model: nn.Module,
    loader: Any,
    method: PostHoc | Probe | str | None = None,
    *,
    validation: Any = None,
    head: str | None = None,
    class_counts: Any = None,
    device: str = "auto",
    images_per_class: int | Literal["all", "auto"] = "all",
    seed: int = 0,
    progress: bool = True,
) -> tuple[nn.Module, PostHoc | Probe]:
    """Calibrate a trained model; returns a new model of the same class, and the fitted method.

    The new model has no wrappers (DistributedDataParallel, DataParallel, torch.compile).

    A multi-label model takes `MultiLabelCalibration()`: batches are (inputs, labels (N, K) of 0 and 1), and the method
    is fitted on `validation` or, without it, on the loader, which must then hold samples the model has not seen.

    Args:
        model: a classifier whose last layer is an `nn.Linear`, with a row per class, or one row for two classes; it is
            not changed.
        loader: batches of its training set, as for `extract`; augmented as in training if you can.
        method: the method to fit, or its name in `longtail methods`; by default `HALO()` if `validation` is given, else
            `MARC()`. `Probe()` replaces the head, for a backbone that was not trained on these images: give them
            without augmentation.
        validation: batches of held-out images, on which HALO and confidence methods are fitted and hyper-parameters
            chosen.
        head: name of the last linear layer; by default it is found by running the model.
        class_counts: (K,) training samples per class, if the loader does not contain all of them.
        device: where to run the model.
        images_per_class: at most so many samples of every class are read and run, "auto" for as many as the method
            needs. The loader must be a data set with a list of its labels, or a `DataLoader` of one.
        seed: random seed that selects these samples.
        progress: show a progress bar, in a terminal or a notebook.
    """
    if method is None or isinstance(method, str):
        default = MARC() if validation is None else HALO()
        method = build_posthoc(method, {}) if method else default
    given, method = method, ProbeHead.of(method) if isinstance(method, Probe) else method
    display = Display(quiet=not progress)
    method.check_settings()
    subsample = None
    if method.multilabel and (images_per_class != "all" or class_counts is not None):
        raise UserError(f"{type(method).__name__} takes neither images_per_class nor class_counts: leave them out")
    if method.multilabel and validation is not None:
        loader, validation = validation, None
    if images_per_class != "all":
        subsample = chosen_images(images_per_class, method, np.bincount(listed_labels(loader)), seed)
    source, held_out_source = Source(loader, subsample), None if validation is None else Source(validation)
    shards = max(source.info.shards, 1 if held_out_source is None else held_out_source.info.shards)
    forms = MULTI_LABEL if method.multilabel else SINGLE_LABEL
    with inference_session(model, device, name=head, forms=forms, shards=shards) as session:
        if session.sharding == "fsdp":
            raise UserError(
                f"{type(session.model).__name__} is wrapped by FSDP, which cannot be copied; gather its weights into a "
                f"plain model and calibrate that, or add the method after the model: {ATTACH}"
            )
        session.check = partial(_require_foldable, method, session)
        if method.multilabel:
            method.fit(*source.multilabel(session, display))
        else:
            train = source.outputs(session, Header("train"), class_counts=class_counts, display=display)
            held_out = None
            if held_out_source is not None:
                counts, validation_header = train.class_counts, Header("validation")
                held_out = held_out_source.outputs(session, validation_header, class_counts=counts, display=display)
            fit_method(method, train, held_out, session.world)
        calibrated = _folded(session, method)
    inside = dict(calibrated.named_modules(remove_duplicate=False))
    for path, module in unwrap(model).named_modules(remove_duplicate=False):  # modes from the outside in
        if path in inside:
            inside[path].train(module.training)
    return calibrated if session.home is None else calibrated.to(session.home), given


def fit_method(
    method: PostHoc, train: Outputs | None, validation: Outputs | None, world: World, *, frozen: bool = False
) -> None:
    """Fit a method on outputs; warns if the model makes no mistakes on them, which a `frozen` backbone explains."""
    with torch.enable_grad():  # some methods train
        fit_outputs(method, train, validation, world)
    if world.is_main and not (frozen and method.for_frozen):
        warn_if_no_errors(method, train)


def views_for(method: PostHoc, run: Run, views: int) -> int:
    """Augmented views of the training images to fit on; a method for frozen backbones takes the images as they are.

    Warns if such a method is to be fitted on images that the backbone was trained on.
    """
    if not method.for_frozen:
        return views
    if not run.is_frozen:
        warn(f"the network of {run.folder} was trained on these images, and {TOO_SURE}")
    return 0


def _require_foldable(method: PostHoc, session: InferenceSession, head: Head) -> None:
    """Refuse, before the pass over the data, models and methods that do not fit together."""
    name = type(session.model).__name__
    if head.obstacle:
        attach = MULTI_LABEL_ATTACH if method.multilabel else ATTACH
        raise UserError(
            f"a calibration cannot be folded into {name}: {head.obstacle}. Add the method after the model: {attach}"
        )
    if method.needs_features and not head.has_features:
        raise UserError(
            f"{type(method).__name__} needs the features before the head, one vector per sample, but the input of "
            f"{', '.join(head.layers)} of {name} has another form; choose a method that works on logits, such as MARC"
        )


def _folded(session: InferenceSession, method: PostHoc) -> nn.Module:
    """A copy of the model with the method folded into its weights; raises if its logits are not the method's."""
    model, head = session.model, session.head
    assert head is not None
    old = [model.get_submodule(path) for path in head.layers]
    make_head = partial(folded_to_one_row, method.head) if head.single else method.head
    calibrated = with_layers(model, old, folded_layers(make_head, old, head.gains))
    for batch in session.samples:
        with random_state_kept():
            outputs = forward(model, batch, head)
        with random_state_kept():
            after = gathered(head.path.logits(calibrated(*batch.args, **batch.kwargs)))
        logits = outputs.logits, method.transform(outputs.logits, outputs.features)
        before, expected = (head.output(one_logit(one) if head.single else one) for one in logits)
        exact = all(cast(Tensor, one).dtype in EXACT for one in (outputs.logits, *(layer.weight for layer in old)))
        if not is_folded(after, expected, before, exact=exact):
            raise UserError(
                f"{type(method).__name__} cannot be folded into {', '.join(head.layers)} of {type(model).__name__}: "
                f"the new model would not give the logits of the method. Add the method after the model: {ATTACH}"
            )
    return calibrated


def is_folded(after: Tensor, expected: Tensor, before: Tensor, *, exact: bool = True) -> bool:
    """Whether a new model gives the expected output (N, K), up to rounding and to a tenth of what the method changes.

    The logit of a class that a target prior rules out is far below all others, so it is compared apart from them.
    """
    after, expected, before = (values.detach().cpu().double() for values in (after, expected, before))
    if after.shape != expected.shape:
        return False
    ruled_out = expected.abs() >= -NEVER / 2
    for where in (ruled_out, ~ruled_out):
        error, change, size = (
            float(values[where].abs().max()) if where.any() else 0.0
            for values in (after - expected, expected - before, expected)
        )
        rounding = (1e-3 if exact else 0.05) * size
        if not error <= rounding or (exact and error > 0.1 * max(change, rounding)):
            return False
    return True


class Applied(nn.Module):
    """A method of the user as a module: logits (N, K) to calibrated logits (N, K)."""

    def __init__(self, method: PostHoc) -> None:
        super().__init__()
        self.method = method

    def forward(self, logits: Tensor) -> Tensor:
        return self.method._apply(logits, None)


def attach(model: nn.Module, method: PostHoc, *, batch: Any = None) -> Attached:
    """The model followed by a fitted method: called like the model, it returns calibrated logits.

    Use it for models into which a calibration cannot be folded; use `calibrate` for all others. The model is not
    copied.

    Args:
        model: returns logits (N, K), or an object that holds them.
        method: fitted on the logits of this model: `method.fit(longtail.extract(model, loader))`.
        batch: a batch of the loader; needed if it is not clear where the logits are in the output, and for multi-label
            models, whose output could be logits or sigmoids.

    >>> from longtail.posthoc.marc import MARC
    >>> logits = torch.tensor([[3.0, 0.0], [2.0, 1.0], [1.5, 1.0], [1.0, 0.8]])
    >>> method = MARC().fit(logits, [0, 0, 0, 1])
    >>> attach(nn.Identity(), method)(logits).argmax(1).tolist()
    [0, 0, 0, 1]
    """
    check_is_fitted(method)
    classes = method.n_features_in_
    layer = _layer_of(method, classes)
    path = None
    if method.multilabel and batch is None:
        raise UserError("pass a batch of the loader as batch=: the output of a multi-label model could be sigmoids")
    if batch is not None:
        forms = MULTI_LABEL if method.multilabel else SINGLE_LABEL
        with inference_session(model, "auto", forms=forms, alone=True) as session:
            some = split_batch(batch, session.model, session.device, multilabel=method.multilabel)
            head = session.detect_head(some)
        if head.form != "logits":
            raise UserError(
                f"{type(session.model).__name__} returns the {head.form} of the output of {head.layers[0]}; "
                "use longtail.calibrate, which folds the method into that layer"
            )
        path = head.path
    attached = Attached(model, layer, classes, path)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    attached.calibration.to(device).requires_grad_(False).train(model.training)
    return attached


def _layer_of(method: PostHoc, classes: int) -> nn.Module:
    """The method as a layer on logits; raises if the layer and the method differ on some logits."""
    some = torch.linspace(-3, 3, 4 * classes).view(4, classes)
    try:
        expected = torch.as_tensor(method.transform(some))
    except UserError as error:
        raise UserError(
            f"an attached method sees only logits ({error}); fit it on logits, method.fit(outputs.logits, "
            "outputs.labels), or choose a method that works on logits, such as MARC"
        ) from error
    layer = _module_of(method, classes)
    with torch.no_grad():
        if not torch.allclose(layer(some).double(), expected.double(), rtol=1e-3, atol=1e-3):
            raise UserError(f"{type(method).__name__} as a layer does not give the same logits as its transform")
    return layer


def _module_of(method: PostHoc, classes: int) -> nn.Module:
    if isinstance(method, AffinePostHoc):
        return ScaleShift(torch.as_tensor(method.scale_), torch.as_tensor(method.shift_))
    if type(method).fold is PostHoc.fold and type(method).head is PostHoc.head:
        return Applied(method)
    return method.head(linear_layer(torch.eye(classes), torch.zeros(classes)))
