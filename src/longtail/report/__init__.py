"""Reports and figures; they need packages that are optional."""

from importlib.util import find_spec

from longtail.errors import UserError


def require_packages(what: str, *packages: str) -> None:
    """Raises before any work is done if one of these packages is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UserError(f"{what} needs {', '.join(missing)}: pip install 'longtail[report]'")
