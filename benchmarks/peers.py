"""longtail beside what people use otherwise, on the same features: accuracy, confidence, time, lines of user code.

A ResNet-32 of CIFAR-10-LT 100: training images (one augmented view, 12,406 features of 64 numbers, seen by the
network), held-out images (half of the test images, balanced) and test images (the other half). Each entry below is a
function; its body is what a user writes, and its lines are counted. Torch-uncertainty and netcal are measured where
they are installed, for example in a folder of their own (`pip install --target FOLDER …`, then `PYTHONPATH=FOLDER`).
They import torchvision; where it is not built for this torch, its operators are declared as the tests do.

Processor time of fit and prediction, the fastest of some turns in which all entries alternate, relative to MARC.
"""

from __future__ import annotations

import argparse
import inspect
import runpy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from common import HERE, processor_seconds, write_results
from images_per_class import real
from sklearn.calibration import CalibratedClassifierCV
from sklearn.linear_model import LogisticRegression

from longtail import MARC, Outputs
from longtail.metrics.confidence import expected_calibration_error, softmax
from longtail.posthoc import TemperatureScaling, Tempered, VectorScaling


@dataclass(frozen=True)
class Data:
    """Logits and features of the three sets."""

    train: Outputs
    held_out: Outputs
    test: Outputs


def network(data: Data) -> np.ndarray:
    """the network as it is | nothing"""
    return softmax(np.asarray(data.test.logits))


def marc(data: Data) -> np.ndarray:
    """longtail MARC | training images"""
    method = MARC().fit(data.train)
    return np.asarray(method.predict_proba(data.test))


def marc_tempered(data: Data) -> np.ndarray:
    """longtail MARC, then a temperature | training and held-out images"""
    method = Tempered(MARC()).fit(data.train, validation=data.held_out)
    return np.asarray(method.predict_proba(data.test))


def stage_two(data: Data) -> np.ndarray:
    """the released MARC's stage two, its steps on stored outputs | training images"""
    method = MARC(solver="sgd", schedule="release", divide_by="weights").fit(data.train)
    return np.asarray(method.predict_proba(data.test))


def temperature(data: Data) -> np.ndarray:
    """longtail TemperatureScaling | held-out images"""
    method = TemperatureScaling().fit(data.held_out)
    return np.asarray(method.predict_proba(data.test))


def vector(data: Data) -> np.ndarray:
    """longtail VectorScaling | held-out images"""
    method = VectorScaling().fit(data.held_out)
    return np.asarray(method.predict_proba(data.test))


def uncertainty_temperature(data: Data) -> np.ndarray:
    """torch_uncertainty TemperatureScaler | held-out images"""
    from torch.utils.data import DataLoader, TensorDataset
    from torch_uncertainty.post_processing import TemperatureScaler

    logits, labels = torch.from_numpy(np.asarray(data.held_out.logits)), torch.from_numpy(data.held_out.labels)
    scaler = TemperatureScaler(torch.nn.Identity())
    scaler.fit(DataLoader(TensorDataset(logits, labels), batch_size=512))
    return scaler(torch.from_numpy(np.asarray(data.test.logits))).softmax(-1).detach().numpy()


def uncertainty_vector(data: Data) -> np.ndarray:
    """torch_uncertainty VectorScaler | held-out images"""
    from torch.utils.data import DataLoader, TensorDataset
    from torch_uncertainty.post_processing import VectorScaler

    logits, labels = torch.from_numpy(np.asarray(data.held_out.logits)), torch.from_numpy(data.held_out.labels)
    scaler = VectorScaler(num_classes=10, model=torch.nn.Identity())
    scaler.fit(DataLoader(TensorDataset(logits, labels), batch_size=512))
    return scaler(torch.from_numpy(np.asarray(data.test.logits))).softmax(-1).detach().numpy()


def netcal_temperature(data: Data) -> np.ndarray:
    """netcal TemperatureScaling | held-out images"""
    from netcal.scaling import TemperatureScaling as Scaler

    scaler = Scaler()
    scaler.fit(softmax(np.asarray(data.held_out.logits)), data.held_out.labels)
    return np.asarray(scaler.transform(softmax(np.asarray(data.test.logits))))


def logistic_regression(data: Data) -> np.ndarray:
    """scikit-learn LogisticRegression(class_weight="balanced") | training images"""
    method = LogisticRegression(class_weight="balanced", max_iter=1000).fit(data.train.features, data.train.labels)
    return np.asarray(method.predict_proba(data.test.features))


def calibrated_regression(data: Data) -> np.ndarray:
    """scikit-learn CalibratedClassifierCV of it | training images, five folds"""
    method = CalibratedClassifierCV(LogisticRegression(class_weight="balanced", max_iter=1000))
    method.fit(data.train.features, data.train.labels)
    return np.asarray(method.predict_proba(data.test.features))


Entry = Callable[[Data], np.ndarray]
ENTRIES: dict[Entry, str | None] = {
    network: None,
    marc: None,
    marc_tempered: None,
    stage_two: None,
    temperature: None,
    uncertainty_temperature: "torch_uncertainty",
    netcal_temperature: "netcal",
    vector: None,
    uncertainty_vector: "torch_uncertainty",
    logistic_regression: None,
    calibrated_regression: None,
}


def lines_of(entry: Entry) -> int:
    """Lines of code in its body, without the line of its description."""
    return len([line for line in inspect.getsource(entry).splitlines()[2:] if line.strip()])


def three_sets() -> Data:
    train, test = real()
    held_out = np.random.default_rng(0).permutation(len(test)) < len(test) // 2

    def some(chosen: np.ndarray, split: str) -> Outputs:
        assert test.logits is not None
        assert test.features is not None
        arrays = {"logits": test.logits[chosen], "features": test.features[chosen]}
        known = {"head_weight": test.head_weight, "head_bias": test.head_bias}
        return Outputs(test.labels[chosen], train.class_counts, split=split, **arrays, **known)

    return Data(train, some(held_out, "validation"), some(~held_out, "test"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of other libraries: what they give is shown
    _declared = (
        runpy.run_path(str(HERE.parent / "tests" / "torchvision_operators.py")) if find_spec("torchvision") else {}
    )
    data = three_sets()
    installed = [entry for entry, needs in ENTRIES.items() if needs is None or find_spec(needs)]
    shares = {entry: entry(data) for entry in installed}
    turns = [{entry: processor_seconds(partial(entry, data)) for entry in installed} for _ in range(arguments.turns)]
    fastest = {entry: min(turn[entry] for turn in turns) for entry in installed}
    rows: list[dict[str, object]] = []
    for entry in ENTRIES:
        name, fitted_on = (entry.__doc__ or "").split(" | ")
        row: dict[str, object] = {"what": name, "fitted on": fitted_on, "lines of user code": lines_of(entry)}
        if entry in installed:
            right = shares[entry].argmax(1) == data.test.labels
            by_class = [100 * right[data.test.labels == label].mean() for label in range(data.test.num_classes)]
            row["balanced accuracy"] = float(np.mean(by_class))
            row["worst class"] = float(min(by_class))
            row["ECE"] = 100 * expected_calibration_error(shares[entry], data.test.labels)
            row["time / MARC's"] = fastest[entry] / fastest[marc]
        else:
            row["balanced accuracy"] = "not installed"
        rows.append(row)
    write_results(
        "peers",
        "Other libraries on the same features",
        rows,
        "CIFAR-10-LT 100, features of a ResNet-32; accuracy and ECE in per cent on 5,000 test images. Time is "
        "processor time of fit and prediction. Held-out images are balanced, training images are not: scales per "
        "class that are fitted on balanced images correct the long tail too, where there are such images. The released "
        "code runs the network in every step of stage two; its steps are made here on stored outputs, so its time "
        "leaves the network out.",
    )


if __name__ == "__main__":
    main()
