"""Target priors: words, powers, weights and files."""

import csv

import numpy as np
import pytest
import torch

from longtail.errors import UserError
from longtail.posthoc.priors import (
    NEVER,
    check_target_prior,
    log_target,
    read_weights,
    shifted,
    shifted_head,
)


def test_target_priors():
    log_prior = np.log([0.7, 0.2, 0.1])
    names = ("a", "b", "c")
    np.testing.assert_array_equal(log_target("uniform", log_prior, names), 0)
    np.testing.assert_array_equal(log_target("train", log_prior, names), log_prior)
    np.testing.assert_allclose(log_target(0.5, log_prior, names), 0.5 * log_prior)
    np.testing.assert_allclose(log_target([2, 0, 6], log_prior, names), [np.log(0.25), -np.inf, np.log(0.75)])
    np.testing.assert_allclose(log_target(np.float32(0.5), log_prior, names), 0.5 * log_prior)
    np.testing.assert_allclose(log_target(np.int64(2), log_prior, names), 2 * log_prior)
    for power in (-10, 10):
        log_target(power, log_prior, names)
    for wrong, message in (
        (10.5, "target_prior"),
        (-10.5, "target_prior"),
        ([1, 2], r"one weight per class: shape \(3,\), not \(2,\)"),
        ([1, -1, 0], r"target_prior\[1\] is -1"),
        ([1, 1, np.inf], r"target_prior\[2\] is inf"),
        ([0, 0, 0], "0 for every class"),
        (True, "target_prior must"),
    ):
        with pytest.raises(UserError, match=message):
            log_target(wrong, log_prior, names)
    shift = np.array([1.0, -np.inf, 2.0])
    moved = shifted(torch.ones(2, 3), shift)
    assert moved.tolist() == [[2.0, NEVER, 3.0]] * 2
    weight, bias = shifted_head(torch.ones(3, 2), torch.ones(3), shift)
    assert weight.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert bias.tolist() == [2.0, NEVER, 3.0]


def test_logits_below_that_of_a_class_that_never_occurs_are_refused():
    shift = np.array([0.0, -np.inf, 0.0])
    low = torch.tensor([[0.0, 0.0, 0.0], [2 * NEVER, 5.0, 3 * NEVER]])
    with pytest.raises(UserError, match="a class of target prior 0 would be predicted"):
        shifted(low, shift)
    low[1, 0] = 0.9 * NEVER  # the best class that may occur is above it: its rival may be anywhere
    assert shifted(low, shift).argmax(1).tolist() == [0, 0]


@pytest.mark.parametrize("divided_by", [",", ";", "\t"])
@pytest.mark.parametrize("heading", [True, False])
def test_files_of_spreadsheets_and_odd_names(tmp_path, divided_by, heading):
    """Cells divided as in other countries; a class called like the heading, one with spaces, one with a comma."""
    names = ("class", " space ", "café, bar", "b")
    rows = [(name, str(weight)) for weight, name in enumerate(names)]
    with (tmp_path / "prior.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=divided_by).writerows([("class", "weight")] * heading + rows)
    assert read_weights(tmp_path / "prior.csv", names).tolist() == [0, 1, 2, 3]


def test_spaces_around_a_name_do_not_matter_and_a_wrong_first_line_does(tmp_path):
    path = tmp_path / "prior.csv"
    path.write_text(" a , 1\n b,2\n")
    assert read_weights(path, ("a", "b")).tolist() == [1, 2]
    path.write_text("a,many\nb,2\n")
    with pytest.raises(UserError, match="line 1: expected class,weight, found a,many"):
        read_weights(path, ("a", "b"))


def test_a_file_that_is_not_there_is_said():
    with pytest.raises(UserError, match=r"target_prior: no/prior\.csv does not exist"):
        check_target_prior("no/prior.csv")
    with pytest.raises(UserError, match="must be uniform, train, weights per class or a CSV file, not Uniform"):
        check_target_prior("Uniform")
