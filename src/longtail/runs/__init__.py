"""A run folder: what was trained, its network, and its scores."""

from longtail.runs.folder import Run

__all__ = ["Run"]
