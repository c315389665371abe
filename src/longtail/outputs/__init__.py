"""Outputs of a frozen model on one split: the record, its files, and the checks of arrays."""

from longtail.outputs.record import Outputs

__all__ = ["Outputs"]
