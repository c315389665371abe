"""Long-tailed image data: data sets by name or path, tails, validation splits, augmentation, samplers."""

from longtail.data.splits import SOURCES, Splits, open_splits

__all__ = ["SOURCES", "Splits", "open_splits"]
