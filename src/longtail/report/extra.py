"""The optional packages that reports and figures need."""

from __future__ import annotations

from importlib.util import find_spec

from longtail.errors import UserError

DRAWING = ("matplotlib",)
PAGE = (*DRAWING, "jinja2", "plotly")


def require(what: str, packages: tuple[str, ...]) -> None:
    """Raises before any work is done if one of these packages is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UserError(f"{what} needs {', '.join(missing)}: pip install 'longtail[report]'")
