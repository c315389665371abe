"""Scores of predictions: accuracy by class and by shots, confidence, margins, intervals."""

from longtail.metrics.margins import ClassMeans, margins
from longtail.metrics.scores import Metrics, evaluate_logits, evaluate_predictions, reliability, shot_groups

__all__ = ["ClassMeans", "Metrics", "evaluate_logits", "evaluate_predictions", "margins", "reliability", "shot_groups"]
