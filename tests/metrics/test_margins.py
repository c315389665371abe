import numpy as np
import pytest

import longtail
from longtail import Outputs


def test_means_are_those_of_the_definition(cifar_features):
    data = cifar_features
    means = longtail.metrics.margins(data["test"], data["test_y"], weight_norms=data["norms"])
    for j in range(10):
        of_class = data["test"][data["test_y"] == j][:, j].astype(np.float64)
        assert means.logits[j] == pytest.approx(of_class.mean(), rel=1e-6)
        assert means.margins[j] == pytest.approx((of_class / data["norms"][j]).mean(), rel=1e-6)
    outputs = Outputs(data["test_y"], np.bincount(data["y"]), logits=data["test"], head_weight=data["weight"])
    np.testing.assert_allclose(longtail.metrics.margins(outputs).margins, means.margins, rtol=1e-6)


@pytest.mark.parametrize(
    ("labels", "logits", "message"),
    [([-1, 0], np.ones((2, 3)), r"labels must be 0\.\.2"), ([0, 1], np.full((2, 3), np.nan), "row 0 contain NaN")],
)
def test_outputs_are_checked_as_arrays_are(labels, logits, message):
    outputs = Outputs(np.array(labels), np.array([5, 3, 1]), logits=logits)
    with pytest.raises(ValueError, match=message):
        longtail.metrics.margins(outputs)


def test_absent_classes_have_no_mean():
    means = longtail.metrics.margins(np.array([[1.0, 2.0, 3.0]] * 2), [0, 2])
    assert means.samples.tolist() == [1, 0, 1]
    assert np.isnan(means.logits).tolist() == [False, True, False]
    assert means.logits[2] == means.margins[2] == 3


def test_calibration_makes_held_out_margins_flatter(cifar_features):
    """The paper's observation, on images the network was not trained on."""
    from scipy.stats import spearmanr

    data = cifar_features
    marc = longtail.MARC().fit(data["views"][0], data["y"], weight_norms=data["norms"])
    before = longtail.metrics.margins(data["test"], data["test_y"], weight_norms=data["norms"])
    after = longtail.metrics.margins(marc.transform(data["test"]), data["test_y"], weight_norms=data["norms"])
    counts = np.bincount(data["y"])
    assert spearmanr(before.margins, counts).statistic > 0.7
    assert spearmanr(after.margins, counts).statistic < spearmanr(before.margins, counts).statistic
    # Relative to their mean, because a factor that all margins share changes no decision.
    spread = [np.ptp(means.margins) / means.margins.mean() for means in (before, after)]
    assert spread[1] < 0.95 * spread[0]
