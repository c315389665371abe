"""Short runs on the digits: their settings, their weights, and runs that are stopped after given steps."""

from dataclasses import replace

import pytest
import torch

import longtail
from longtail.errors import Interrupted
from longtail.files.tensors import read_tensors
from longtail.recipes import RECIPES
from longtail.training.loop import StopRequest


@pytest.fixture(scope="session")
def short():
    """Settings of a run of ten batches of sixteen images."""
    return replace(RECIPES["digits-lt"], epochs=None, iterations=10, batch_size=16, warmup=0, device="cpu")


@pytest.fixture(scope="session")
def same_weights():
    """Whether two finished runs have the same weights, bit for bit."""

    def compared(first, second):
        one, other = (read_tensors(folder / "model.safetensors")[0] for folder in (first, second))
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    return compared


@pytest.fixture(scope="session")
def stop_after():
    """`stop_after(config, folder, 3, 8)`: a run that is stopped after three steps, goes on, and is stopped again."""

    def stop(config, folder, *steps, **settings):
        asked = iter(range(1, 10_000))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StopRequest, "requested", lambda self, world: next(asked) in steps)
            for number in range(len(steps)):
                with pytest.raises(Interrupted):
                    longtail.train(config, folder, resume=number > 0, **settings)
        assert not (folder / "model.safetensors").exists()

    return stop
