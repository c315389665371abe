"""Every method of the library by name. The file is long because it is one table, with one entry per method.

The command line, the comparison and the parametrised tests go through these dictionaries.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

from torch import Tensor, nn

from longtail.errors import choose
from longtail.files.text import parse_options
from longtail.losses import (
    LADE,
    BalancedSoftmax,
    ClassBalanced,
    Equalization,
    Focal,
    LogitAdjusted,
    Seesaw,
    WeightedCrossEntropy,
)
from longtail.losses.base import Loss
from longtail.networks.bbn import BBN, BBNObjective
from longtail.networks.causal_norm import CausalNorm, CausalNormObjective
from longtail.networks.hybrid_sc import HybridSC, HybridSCObjective
from longtail.networks.objective import (
    Classifier,
    LossObjective,
    Objective,
    classifier_of_form,
    cosine_classifier,
    deferred_ldam,
)
from longtail.networks.oltr import OLTR, OLTRObjective
from longtail.recipes import STAGE_TWO

if TYPE_CHECKING:
    from longtail.posthoc.base import PostHoc


def plain_classifier(backbone: nn.Module, class_counts: Tensor) -> nn.Module:
    """A backbone and a linear head."""
    return Classifier(backbone, len(class_counts))


@dataclass(frozen=True)
class TrainMethod:
    """A way to train a network from images (stage one).

    Args:
        title: name as in the literature.
        family: standard, re-sampling, loss or network.
        paper: where it comes from.
        objective: class_counts (K,) and options → what is minimised.
        model: backbone, class_counts (K,) and options → the network.
        samplers: one stream of images each; a step draws a full batch of each. Two streams of one name
            show the same images, augmented differently.
        needs: what it asks for beyond images and labels.
        balances: whether its loss adds the training prior to the logits, so that these are right for equal classes.
    """

    title: str
    family: str
    paper: str
    objective: Callable[..., Objective]
    model: Callable[..., nn.Module] = plain_classifier
    samplers: tuple[str, ...] = ("instance",)
    needs: str = ""
    balances: bool = False

    def build(self, backbone: nn.Module, class_counts: Tensor, options: dict[str, str]) -> tuple[nn.Module, Objective]:
        """The network and its objective; each option goes to whichever of the two takes it."""
        of_model, of_objective = parse_options(options, self.model, self.objective)
        return self.model(backbone, class_counts, **of_model), self.objective(class_counts, **of_objective)


def of_loss(loss: type[nn.Module]) -> Callable[..., Objective]:
    """The objective of a loss `Loss(class_counts, *, …)` on plain batches, with its options.

    `reduction` and `ignore_index` are not options: training decides them.
    """

    def build(class_counts: Tensor, **options: object) -> Objective:
        return LossObjective(loss(class_counts, **options))

    signature, training = inspect.signature(loss), inspect.signature(Loss).parameters
    options_of_loss = [parameter for name, parameter in signature.parameters.items() if name not in training]
    build.__signature__ = signature.replace(parameters=options_of_loss)  # type: ignore[attr-defined]
    return build


def cross_entropy(class_counts: Tensor) -> Objective:
    return LossObjective(nn.CrossEntropyLoss())


def focal(class_counts: Tensor, *, gamma: float = 2.0, form: Literal["softmax", "sigmoid"] = "softmax") -> Objective:
    return LossObjective(Focal(gamma=gamma, form=form))


@dataclass(frozen=True)
class PostHocMethod:
    """A way to calibrate a trained classifier (stage two).

    Args:
        title: name as in the literature.
        family: decision boundary, calibration.
        paper: where it comes from.
        path: of its class below `longtail.posthoc`: module.Class.
        trains: the numbers it trains, as a formula in p (features) and K (classes).
        needs: what it is fitted on beyond logits and labels.
    """

    title: str
    family: str
    paper: str
    path: str
    trains: str
    needs: str = ""

    @property
    def estimator(self) -> type[PostHoc]:
        """Its class, imported at first use: it imports scikit-learn, which training does not need."""
        module, _, kind = self.path.rpartition(".")
        return cast("type[PostHoc]", getattr(importlib.import_module(f"longtail.posthoc.{module}"), kind))


TRAIN_METHODS: dict[str, TrainMethod] = {
    "softmax": TrainMethod(
        "Softmax",
        "standard",
        "cross-entropy",
        cross_entropy,
    ),
    "cbs": TrainMethod(
        "Class-balanced sampling",
        "re-sampling",
        "Kang et al., Decoupling Representation and Classifier, ICLR 2020",
        cross_entropy,
        samplers=("class-balanced",),
    ),
    "cbw": TrainMethod(
        "Class-balanced weighting",
        "loss",
        "cross-entropy weighted by 1/n",
        of_loss(WeightedCrossEntropy),
    ),
    "class-balanced": TrainMethod(
        "Class-Balanced loss",
        "loss",
        "Cui et al., Class-Balanced Loss Based on Effective Number of Samples, CVPR 2019",
        of_loss(ClassBalanced),
        classifier_of_form,
    ),
    "focal": TrainMethod(
        "Focal",
        "loss",
        "Lin et al., Focal Loss for Dense Object Detection, ICCV 2017",
        focal,
        classifier_of_form,
    ),
    "ldam": TrainMethod(
        "LDAM-DRW",
        "loss",
        "Cao et al., Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss, NeurIPS 2019",
        deferred_ldam,
        cosine_classifier,
    ),
    "lade": TrainMethod(
        "LADE",
        "loss",
        "Hong et al., Disentangling Label Distribution for Long-Tailed Visual Recognition, CVPR 2021",
        of_loss(LADE),
        balances=True,
    ),
    "equalization": TrainMethod(
        "Equalization",
        "loss",
        "Tan et al., Equalization Loss for Long-Tailed Object Recognition, CVPR 2020",
        of_loss(Equalization),
    ),
    "balanced-softmax": TrainMethod(
        "Balanced Softmax",
        "loss",
        "Ren et al., Balanced Meta-Softmax for Long-Tailed Visual Recognition, NeurIPS 2020",
        of_loss(BalancedSoftmax),
        balances=True,
    ),
    "seesaw": TrainMethod(
        "Seesaw",
        "loss",
        "Wang et al., Seesaw Loss for Long-Tailed Instance Segmentation, CVPR 2021",
        of_loss(Seesaw),
    ),
    "logit-adjusted": TrainMethod(
        "Logit-adjusted",
        "loss",
        "Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021",
        of_loss(LogitAdjusted),
        balances=True,
    ),
    "bbn": TrainMethod(
        "BBN",
        "network",
        "Zhou et al., BBN: Bilateral-Branch Network with Cumulative Learning, CVPR 2020",
        BBNObjective,
        BBN,
        samplers=("instance", "reversed"),
        needs="two branches; two streams of images",
    ),
    "hybrid-sc": TrainMethod(
        "Hybrid-SC",
        "network",
        "Wang et al., Contrastive Learning based Hybrid Networks, CVPR 2021",
        HybridSCObjective,
        HybridSC,
        # Two views of one batch as they come, and a batch of class-balanced images.
        samplers=("instance", "instance", "class-balanced"),
        needs="augmentation; a projection beside the head; three streams of images",
    ),
    "oltr": TrainMethod(
        "OLTR",
        "network",
        "Liu et al., Large-Scale Long-Tailed Recognition in an Open World, CVPR 2019",
        OLTRObjective,
        OLTR,
        samplers=("deferred",),
        needs="attention and a memory beside the backbone",
    ),
    "causal-norm": TrainMethod(
        "Causal Norm (TDE)",
        "network",
        "Tang et al., Keeping the Good and Removing the Bad Momentum Causal Effect, NeurIPS 2020",
        CausalNormObjective,
        CausalNorm,
        needs="a moving average of the features",
    ),
}

OWN_FAMILY = "own"  # of methods that are not in the table
FEWEST_HELD_OUT = 20  # samples from which HALO is the default; with fewer it was not measured
DECOUPLING = "Kang et al., Decoupling Representation and Classifier for Long-Tailed Recognition, ICLR 2020"

POSTHOC_METHODS: dict[str, PostHocMethod] = {
    "crt": PostHocMethod("Decouple-cRT", "decision boundary", DECOUPLING, "crt.CRT", trains="pK + K", needs="features"),
    "lws": PostHocMethod("Decouple-LWS", "decision boundary", DECOUPLING, "lws.LWS", trains="K"),
    "tau-norm": PostHocMethod(
        "Decouple-tau-norm",
        "decision boundary",
        DECOUPLING,
        "tau_norm.TauNorm",
        trains="0",
        needs="head, validation split",
    ),
    "disalign": PostHocMethod(
        "DisAlign",
        "decision boundary",
        "Zhang et al., Distribution Alignment, CVPR 2021",
        "disalign.DisAlign",
        trains="p + 2K + 1",
        needs="features",
    ),
    "logit-adjustment": PostHocMethod(
        "Logit adjustment",
        "decision boundary",
        "Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021",
        "logit_adjustment.LogitAdjustment",
        trains="0",
        needs="class counts",
    ),
    "marc": PostHocMethod(
        "MARC",
        "decision boundary",
        "Wang et al., Margin Calibration for Long-Tailed Visual Recognition, ACML 2022",
        "marc.MARC",
        trains="2K",
        needs="head",
    ),
    "halo": PostHocMethod(
        "HALO",
        "decision boundary",
        "held-out adjusted logits, this library's own",
        "halo.HALO",
        trains="pK + K + 5",
        needs="features, validation split",
    ),
    "probe": PostHocMethod(
        "Probe",
        "decision boundary",
        "a ridge head on frozen features, this library's own",
        "probe.method.ProbeHead",
        trains="pK + K + 1",
        needs="features of a backbone that was not trained on these images",
    ),
    "temperature": PostHocMethod(
        "Temperature scaling",
        "confidence",
        "Guo et al., On Calibration of Modern Neural Networks, ICML 2017",
        "scaling.TemperatureScaling",
        trains="1",
        needs="validation split",
    ),
    "vector": PostHocMethod(
        "Vector scaling",
        "confidence",
        "Guo et al., On Calibration of Modern Neural Networks, ICML 2017",
        "scaling.VectorScaling",
        trains="2K",
        needs="validation split",
    ),
    "matrix": PostHocMethod(
        "Matrix scaling",
        "confidence",
        "Kull et al., Beyond temperature scaling, NeurIPS 2019",
        "scaling.MatrixScaling",
        trains="K^2 + K",
        needs="validation split",
    ),
    "platt": PostHocMethod(
        "Platt scaling",
        "confidence",
        "Platt, Probabilistic Outputs for Support Vector Machines, 1999",
        "platt.PlattScaling",
        trains="2K",
        needs="validation split",
    ),
}


def build_posthoc(
    name: str,
    options: dict[str, str],
    *,
    data: str | None = None,
    train_images: int | None = None,
    trained_by: str | None = None,
    frozen: bool = False,
) -> PostHoc:
    """A post-hoc method by name, with options given as text.

    Settings that are not among the options are those of the data set's stage two, if `data` is one that has it.
    If the network was `trained_by` a method that balances its logits, `for_balanced_logits` of the method is set. If
    its features are `frozen` and its head is a Probe, whose logits are balanced, so is `for_frozen_backbone`.

    >>> build_posthoc("marc", {"gamma": "0.9"})
    MARC(gamma=0.9)
    >>> build_posthoc("marc", {"solver": "sgd"}, data="places-lt", train_images=62_500)
    MARC(batch_size=128, max_iter=4883, solver='sgd')
    """
    estimator = POSTHOC_METHODS[choose("method", name, POSTHOC_METHODS)].estimator
    (given,) = parse_options(options, estimator.__init__)
    if frozen or (trained_by and TRAIN_METHODS[trained_by].balances):
        given = {**estimator.for_balanced_logits, **(estimator.for_frozen_backbone if frozen else {}), **given}
    stage = STAGE_TWO.get(data or "")
    if stage is None or train_images is None:
        return estimator(**given)
    recipe: dict[str, object] = {
        "steps": stage.steps(train_images),
        "batch_size": stage.batch_size,
        "weight_decay": stage.weight_decay,
    }
    settings = {setting: recipe[name] for setting, name in estimator.stage_two.items()}
    if "solver" in inspect.signature(estimator).parameters and given.get("solver") != "sgd":
        settings.pop("max_iter")  # the exact solver counts passes, not steps
    return estimator(**{**settings, **given})


def default_posthoc(held_out: int, *, frozen: bool = False) -> tuple[str, str]:
    """The post-hoc method for what there is, and the reason.

    Args:
        held_out: samples that the network was not trained on.
        frozen: whether its features were never trained on the samples at all.

    >>> default_posthoc(500)
    ('halo', '500 images were held out of training')
    >>> default_posthoc(0)[0], default_posthoc(0, frozen=True)[0]
    ('marc', 'probe')
    """
    if frozen:
        return "probe", "the backbone was not trained on these images"
    if held_out >= FEWEST_HELD_OUT:
        return "halo", f"{held_out:,} images were held out of training"
    number = "no image was" if held_out == 0 else f"only {held_out:,} were" if held_out > 1 else "only one was"
    return "marc", f"it needs no held-out images, and {number} held out of training"


def candidate_title(name: str) -> str:
    """The title of a method that `diagnose` tries; the name itself if a file of another version has it.

    >>> candidate_title("softmax"), candidate_title("crt")
    ('Softmax (unchanged)', 'Decouple-cRT')
    """
    if name == "softmax":
        return "Softmax (unchanged)"
    return POSTHOC_METHODS[name].title if name in POSTHOC_METHODS else name


def describe_posthoc(method: PostHoc, name: str | None = None) -> tuple[PostHocMethod, str]:
    """The entry of a method in the table, and its name; a user's class is described by the name of the class alone."""
    kind = type(method).__name__
    for listed, entry in POSTHOC_METHODS.items():
        if f"longtail.posthoc.{entry.path}" == f"{type(method).__module__}.{kind}":
            return entry, name or listed
    if method.wrapped is not None:
        inner, inner_name = describe_posthoc(method.wrapped, name)
        title, trains = f"{inner.title} + {method.adds or kind}", f"{inner.trains} + 1"
        return replace(inner, title=title, trains=trains), inner_name
    return PostHocMethod(kind, OWN_FAMILY, "", kind, trains=""), name or kind.lower()
