"""The command line."""

from longtail.cli.main import main

__all__ = ["main"]
