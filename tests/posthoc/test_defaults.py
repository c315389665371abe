"""Every default of a post-hoc method, in one table: results in papers and in `docs/results` are made with these."""

import inspect

import pytest

import longtail.posthoc
from longtail.posthoc import PostHoc

PAPER_SGD = {"batch_size": 512, "seed": 0}
PASSES = {"tolerance": 1e-5, "max_iter": 500}
DEFAULTS = {
    # Kang et al. 2020: learning rate 0.2; weight decay 5e-4; tau on validation images.
    "CRT": {**PAPER_SGD, "solver": "exact", "ridge": 5e-4, "tolerance": 1e-4, "max_iter": None, "lr": 0.2},
    "LWS": {**PASSES, "ridge": 5e-4},
    "TauNorm": {"tau": "auto"},
    # Zhang et al. 2021.
    "DisAlign": {
        **PAPER_SGD,
        "gamma": 1.2,
        "form": "paper",
        "max_iter": 2000,
        "lr": 0.1,
        "weight_decay": 5e-4,
        "divide_by": "batch",
    },
    # The paper's: gamma 1.2 for all data, stage two from 0.05 along a cosine.
    "MARC": {
        **PAPER_SGD,
        "gamma": 1.2,
        "solver": "exact",
        "ridge": 5e-4,
        "ridge_centre": "identity",
        "tolerance": 1e-5,
        "max_iter": None,
        "lr": 0.05,
        "schedule": "paper",
        "divide_by": "batch",
    },
    "LogitAdjustment": {"tau": 1.0},
    "HALO": {"target_prior": "uniform", "held_out": "validation", "model_prior": "auto", "tolerance": 1e-3, "seed": 0},
    "Auto": {"target_prior": "uniform", "seed": 0},
    "TemperatureScaling": {"tolerance": 1e-6, "max_iter": 200},
    "VectorScaling": {**PASSES, "ridge": 1e-6},
    "MatrixScaling": {**PASSES, "off_diagonal": 0.1, "intercept": 0.1},
    "PlattScaling": {"ridge": 1e-8, "tolerance": 1e-6, "max_iter": 500},
    "Tempered": {},
}


def defaults(function):
    found = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in found if one.default is not one.empty}


def test_every_method_is_in_the_table():
    public = {name: getattr(longtail.posthoc, name) for name in longtail.posthoc.__all__}
    methods = {name for name, found in public.items() if isinstance(found, type) and issubclass(found, PostHoc)}
    assert methods - {"PostHoc", "AffinePostHoc"} == set(DEFAULTS)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_the_authors(name):
    assert defaults(getattr(longtail.posthoc, name).__init__) == DEFAULTS[name]


FLAGS = ("needs_features", "needs_every_class", "fitted_on_unseen", "learns_from_seen")
NEEDS = {
    "CRT": (True, True, False, True),
    "LWS": (False, True, False, True),
    "TauNorm": (False, False, False, False),
    "DisAlign": (True, True, False, True),
    "MARC": (False, True, False, True),
    "LogitAdjustment": (False, False, False, False),
    "HALO": (False, True, False, False),
    "Auto": (False, True, False, False),
    "TemperatureScaling": (False, False, True, True),
    "VectorScaling": (False, True, True, True),
    "MatrixScaling": (False, True, True, True),
    "PlattScaling": (False, True, True, True),
}


@pytest.mark.parametrize("name", NEEDS)
def test_what_a_method_needs(name):
    method = getattr(longtail.posthoc, name)()
    assert tuple(getattr(method, flag) for flag in FLAGS) == NEEDS[name]
    chosen = {"TauNorm": ("tau",), "LogitAdjustment": ("tau",), "MARC": ("gamma",)}
    assert method.tuned == chosen.get(name, ())
    waiting = {"TauNorm", "HALO", "Auto", "TemperatureScaling", "VectorScaling", "MatrixScaling", "PlattScaling"}
    assert method.needs_validation == (name in waiting)
