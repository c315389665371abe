"""Stage one: training loop, schedule, checkpoints, and default settings for images."""

from longtail.training.defaults import recipe_for

__all__ = ["recipe_for"]
