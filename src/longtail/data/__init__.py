"""Long-tailed image data: data sets by name or path, tails, validation splits, augmentation, samplers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longtail.data.images import Images as Images
    from longtail.data.sources import SOURCES as SOURCES
    from longtail.data.splits import Splits as Splits
    from longtail.data.splits import open_splits as open_splits
else:

    def __getattr__(name: str) -> Any:
        """The public names, imported when they are used: help texts read `sources` alone, without torch."""
        from importlib import import_module

        homes = {"Images": "images", "Splits": "splits", "open_splits": "splits", "SOURCES": "sources"}
        if name not in homes:
            raise AttributeError(f"module 'longtail.data' has no attribute {name!r}")
        return getattr(import_module(f"longtail.data.{homes[name]}"), name)


__all__ = ["SOURCES", "Images", "Splits", "open_splits"]
