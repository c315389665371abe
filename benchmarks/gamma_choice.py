"""Why `gamma="auto"` wants held-out outputs: what training logits would choose, on real features.

A ResNet-32 trained on CIFAR-10-LT 100 is calibrated for a range of gammas. Balanced accuracy is read
off the images the network was trained on and off held-out ones (half of the test images); what each
would choose is scored on the other half.
"""

from __future__ import annotations

import numpy as np
from common import shared_folder, write_results

from longtail import MARC, Outputs
from longtail.metrics.scores import evaluate_logits
from longtail.posthoc.marc import GAMMAS


def main() -> None:
    with np.load(shared_folder() / "data" / "cifar10_lt100_resnet32_features.npz") as file:
        arrays = {name: file[name].astype(np.float32) for name in file.files if "labels" not in name}
        train_labels, test_labels = (file[name].astype(np.int64) for name in ("train_labels", "test_labels"))
    weight, bias = arrays["head_weight"], arrays["head_bias"]
    counts = np.bincount(train_labels)
    held_out = np.random.default_rng(0).permutation(len(test_labels)) < len(test_labels) // 2

    def outputs(features: np.ndarray, labels: np.ndarray, split: str) -> Outputs:
        logits = features @ weight.T + bias
        return Outputs(labels, counts, logits=logits, head_weight=weight, head_bias=bias, split=split)

    fitted_on = outputs(arrays["train_views"][0], train_labels, "train")
    seen = {
        "training images": outputs(arrays["train_clean"], train_labels, "train"),
        "held-out images": outputs(arrays["test"][held_out], test_labels[held_out], "validation"),
        "the other half": outputs(arrays["test"][~held_out], test_labels[~held_out], "test"),
    }
    rows: list[dict[str, object]] = []
    for gamma in GAMMAS:
        method = MARC(gamma).fit(fitted_on)
        scores = {}
        for name, shown in seen.items():
            scores[name] = 100 * evaluate_logits(np.asarray(method.transform(shown)), shown.labels, counts).balanced
        rows.append({"gamma": round(float(gamma), 2), **scores})
    chosen = {name: max(rows, key=lambda row: row[name]) for name in ("training images", "held-out images")}
    notes = " ".join(
        f"By {name} gamma {row['gamma']} would be chosen, which scores {row['the other half']:.1f} on the other half."
        for name, row in chosen.items()
    )
    write_results(
        "gamma_choice",
        "Choosing gamma on training logits, and on held-out ones",
        rows,
        "Balanced accuracy of MARC by gamma. A network is sure of the images it was trained on, so they ask for "
        f"less repair of the tail than it needs. {notes}",
        chosen={name: row["gamma"] for name, row in chosen.items()},
    )


if __name__ == "__main__":
    main()
