"""Scores of predictions: accuracy by class and by shots, confidence, margins, intervals."""

from longtail.metrics.confidence import Predictions, expected_calibration_error, reliability
from longtail.metrics.margins import ClassMeans, margins
from longtail.metrics.scores import Metrics, average_precision, evaluate, evaluate_predictions, shot_groups
from longtail.metrics.table import SCORES, SHOTS, Score

__all__ = [
    "SCORES",
    "SHOTS",
    "ClassMeans",
    "Metrics",
    "Predictions",
    "Score",
    "average_precision",
    "evaluate",
    "evaluate_predictions",
    "expected_calibration_error",
    "margins",
    "reliability",
    "shot_groups",
]
