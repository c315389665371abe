"""How a fit ended: the record that every post-hoc method leaves in `result_`."""

from __future__ import annotations

from dataclasses import dataclass

from longtail.posthoc.solver import Solution


@dataclass(frozen=True)
class FitResult:
    """How a fit ended."""

    converged: bool
    iterations: int
    gradient: float | None
    seconds: float
    value: float | None = None

    @classmethod
    def of(cls, solution: Solution) -> FitResult:
        return cls(solution.converged, solution.evaluations, solution.gradient, solution.seconds, solution.value)

    @classmethod
    def closed_form(cls) -> FitResult:
        """A fit without iterations."""
        return cls(converged=True, iterations=0, gradient=None, seconds=0.0)
