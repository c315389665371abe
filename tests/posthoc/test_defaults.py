"""Every default of a post-hoc method, in one table: results in papers and in `docs/results` are made with these."""

import dataclasses
import importlib
import inspect
import math
import pkgutil

import pytest

import longtail.posthoc
from longtail.posthoc import (
    PostHoc,
    affine,
    candidates,
    class_statistics,
    cross_fit,
    curvature,
    fitting,
    halo,
    heads,
    held,
    inputs,
    likelihood,
    linear,
    marc,
    model_prior,
    scaling,
    selection,
    solver,
    stack,
    target_prior,
    tau,
    unseen,
)
from longtail.posthoc.marc import GAMMAS, PAPER_GAMMA
from longtail.posthoc.selection import TAUS
from longtail.posthoc.sgd import learning_rate, train_parameters
from longtail.posthoc.solver import minimise

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
        "ridge_centre": "zero",
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


def test_what_is_tried_for_auto():
    """Kang et al.: tau from 0 to 2 in steps of 0.1."""
    assert TAUS == GAMMAS == tuple(step / 10 for step in range(21))
    assert PAPER_GAMMA == 1.2


def test_defaults_of_the_ways_to_solve():
    told = defaults(minimise)
    assert (told["tolerance"], told["max_evaluations"]) == (1e-5, 500)
    assert defaults(train_parameters) == {"warmup": 0, "weight_decay": 0.0, "sampler": "instance", "seed": 0}
    assert defaults(learning_rate) == {"warmup": 0}


# Numbers that were chosen or measured once: a change of one changes results, or what they cost, and is meant.
CONSTANTS = {
    affine: {"SMALL_PROBLEM": 1 << 22, "PART": 4, "FEWEST": 3, "REFERENCE_CLASSES": 10},
    candidates: {"FOLDS": 5, "SURE": 2.0},
    class_statistics: {"SHRINKAGE": 0.1},
    cross_fit: {
        "FEWEST": 3,
        "MOST": 5,
        "FIRST_RIDGE": 0.4,
        "RIDGE_STEP": 4.0,
        "LAST_RIDGE": 1e-6,
        "STAGE_STEPS": 8,
        "WELL_KNOWN": 0.01,
        "LARGEST_SCALE": 50.0,
        "LOOKED_AT": 1 << 24,
        "SMALLEST_CURVATURE": 1e-9,
    },
    curvature: {"MEMORY": 20, "TINY": 1e-300},
    fitting: {"LOOKED_AT": 20_000, "ALL_KNOWN": 0.99},
    halo: {"REMEMBERED": 1 << 28, "ENOUGH": 500, "FEW": 50},
    held: {"BLOCK": 1 << 17},
    heads: {"WEIGHT_RIDGE": 0.01, "BIAS_RIDGE": 1e-4, "NOTHING": 1e-6},
    likelihood: {"TEMPERATURES": (0.05, 20.0), "USUAL_SPREAD": (0.1, 100.0)},
    linear: {"SMALL_PROBLEM": 1 << 22, "SINGLE_PRECISION": 1e-5},
    marc: {"RELEASE_WARMUP": 800, "ENOUGH_IMAGES": 800, "FEWEST_IMAGES": 50, "COARSE": 4, "ROUGH": 3e-4},
    model_prior: {"LOOKED_AT": 1 << 20, "CLEAR": 3.0, "TRAINED": (0.75, 10.0)},
    scaling: {"HOTTEST": 1000.0},
    selection: {"NEIGHBOURS": 5},
    solver: {
        "ROUGH": 3e-2,
        "FAR_ROUND": 4,
        "ROUND": 10,
        "NEGLIGIBLE": 1e-13,
        "TRUSTED": 1e-2,
        "SMALL_CHANGE": 1e-6,
        "DECREASE": 1e-4,
        "FLATTER": 0.9,
    },
    stack: {
        "STEPS": 50,
        "SHORTEST": 1e-9,
        "LAST_STEP": 0.02,
        "LAST_EXACT_STEP": 1e-8,
        "ROUNDING": 1e-6,
        "SMALLEST": 1e-12,
        "LARGEST": 1e12,
        "EXTRAPOLATED": 0.1,
        "FAR": 3.0,
        "FLAT": 0.05,
        "LN_2": math.log(2),
        "NEARLY_NONE": -100.0,
        "UNIT_STEP": math.log(4),
        "SAME_UNIT": math.log(3),
    },
    target_prior: {"NEVER": -1e4},
    tau: {"USUAL_TAU": 1.0},
    unseen: {"SHARED": 0.1},
}


@pytest.mark.parametrize("module", CONSTANTS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_numbers_that_results_rest_on(module):
    assert {name: getattr(module, name) for name in CONSTANTS[module]} == CONSTANTS[module]


def test_defaults_of_functions_that_methods_call():
    assert defaults(cross_fit.cross_fit) == defaults(candidates.try_candidates) == {"seed": 0}
    assert defaults(fitting.chosen_images) == {"seed": 0}
    assert not defaults(stack.Stack.__init__)["extrapolated"]
    assert not defaults(stack.Stack.solve)["exact"]
    assert not defaults(linear.LinearProblem.__init__)["exact"]
    assert defaults(affine.AffineProblem.__init__)["shifts"]
    assert {defaults(one)["need_every_class"] for one in (inputs.from_arrays, inputs.from_outputs)} == {True}


def test_records_are_not_changed_in_place():
    """What was fitted is shared by tables, pages and files: nobody may write into it."""
    found = set()
    for module in pkgutil.iter_modules(longtail.posthoc.__path__, "longtail.posthoc."):
        for one in vars(importlib.import_module(module.name)).values():
            if isinstance(one, type) and dataclasses.is_dataclass(one) and one.__module__ == module.name:
                found.add(one)
    assert len(found) > 5
    assert [one.__name__ for one in found if not one.__dataclass_params__.frozen] == []
