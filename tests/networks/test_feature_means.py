import numpy as np
import torch

from longtail.networks.oltr import ClassMeans

COUNTS = torch.tensor([20, 4, 1, 3])


def test_means_are_the_formula():
    """Class by class: each image leaves 1 - 1/n of what was there; the start is corrected for."""
    rng = np.random.default_rng(0)
    running = ClassMeans(COUNTS, 3).double()
    sums, weights = np.zeros((4, 3)), np.zeros(4)
    for _ in range(5):
        labels = rng.integers(3, size=6)  # class 3 never comes
        features = rng.normal(size=(6, 3))
        running.add(torch.from_numpy(features), torch.from_numpy(labels))
        for c in range(4):
            own = features[labels == c]
            if len(own):
                keep = (1 - 1 / int(COUNTS[c])) ** len(own)
                sums[c] = keep * sums[c] + (1 - keep) * own.mean(0)
                weights[c] = keep * weights[c] + 1 - keep
        expected = sums / np.where(weights > 0, weights, 1)[:, None]
        np.testing.assert_allclose(running.means(), expected, rtol=1e-6)
    assert running.means()[3].abs().max() == 0


def test_constant_features_and_classes_of_one_image():
    running = ClassMeans(COUNTS, 2)
    for value in (1.0, 5.0):
        running.add(torch.tensor([[7.0, -7.0], [value, value]]), torch.tensor([0, 2]))
    torch.testing.assert_close(running.means()[0], torch.tensor([7.0, -7.0]))
    assert running.means()[2].tolist() == [5.0, 5.0]  # the latest


def test_state_is_kept_in_the_weights_but_not_the_counts():
    running, other = ClassMeans(COUNTS, 2), ClassMeans(COUNTS, 2)
    running.add(torch.randn(5, 2), torch.tensor([0, 1, 1, 2, 0]))
    assert set(running.state_dict()) == {"sums", "weights"}
    other.load_state_dict(running.state_dict())
    more = torch.randn(2, 2), torch.tensor([0, 3])
    running.add(*more)
    other.add(*more)
    assert torch.equal(running.means(), other.means())


def test_half_precision_and_extreme_features():
    running = ClassMeans(COUNTS, 2)
    running.add(torch.full((2, 2), 1e30), torch.tensor([0, 0]))
    running.add(torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor([2, 2]))
    assert running.means().isfinite().all()
