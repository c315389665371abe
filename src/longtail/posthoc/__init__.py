"""Methods that calibrate a trained classifier from its stored outputs: one file each."""

from longtail.posthoc.affine import AffinePostHoc
from longtail.posthoc.base import PostHoc
from longtail.posthoc.crt import CRT
from longtail.posthoc.disalign import DisAlign
from longtail.posthoc.halo import HALO
from longtail.posthoc.limited import Limited
from longtail.posthoc.logit_adjustment import LogitAdjustment
from longtail.posthoc.lws import LWS
from longtail.posthoc.marc import MARC
from longtail.posthoc.multilabel import MultiLabelCalibration
from longtail.posthoc.platt import PlattScaling
from longtail.posthoc.probe.estimator import Probe
from longtail.posthoc.scaling import MatrixScaling, TemperatureScaling, VectorScaling
from longtail.posthoc.solver import FitResult
from longtail.posthoc.tau_norm import TauNorm
from longtail.posthoc.tempered import Tempered

__all__ = [
    "CRT",
    "HALO",
    "LWS",
    "MARC",
    "AffinePostHoc",
    "DisAlign",
    "FitResult",
    "Limited",
    "LogitAdjustment",
    "MatrixScaling",
    "MultiLabelCalibration",
    "PlattScaling",
    "PostHoc",
    "Probe",
    "TauNorm",
    "TemperatureScaling",
    "Tempered",
    "VectorScaling",
]
