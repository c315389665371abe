"""What a frozen model says about one split: the record, its files, and the checks of arrays."""

from longtail.outputs.record import Outputs

__all__ = ["Outputs"]
