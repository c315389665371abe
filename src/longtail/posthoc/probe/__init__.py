"""Probe: a linear head for long-tailed classes on the features of a frozen backbone."""
