"""Why `gamma="auto"` wants held-out outputs: what training logits would choose, on real features.

A ResNet-32 trained on CIFAR-10-LT 100 is calibrated for a range of gammas. Balanced accuracy is read
off the images the network was trained on and off held-out ones (half of the test images); what each
would choose is scored on the other half.

Then what the choice costs: `gamma="auto"` and `fit_path` beside one solve, in processor time, and whether it is the
choice that solving for every gamma gives, for several draws of the held-out images.
"""

from __future__ import annotations

import numpy as np
from common import processor_seconds, shared_folder, write_results

from longtail import MARC, Outputs
from longtail.metrics.scores import evaluate
from longtail.posthoc.marc import GAMMAS

DRAWS = ((0, 5000), (1, 2500), (2, 1000), (3, 5000), (4, 2500), (5, 1000))


def price(fitted_on: Outputs, test: Outputs) -> None:
    """Write what choosing gamma costs, and how good the choice is."""
    path = MARC().fit_path(fitted_on)
    rows: list[dict[str, object]] = []
    for seed, size in DRAWS:
        held_out = np.random.default_rng(seed).permutation(len(test)) < size

        def some(chosen: np.ndarray) -> Outputs:
            arrays = {"head_weight": test.head_weight, "head_bias": test.head_bias}
            kept = np.asarray(test.logits)[chosen]
            return Outputs(test.labels[chosen], test.class_counts, logits=kept, split="validation", **arrays)

        def score(method: MARC, shown: Outputs) -> float:
            calibrated = np.asarray(method.transform(shown))
            return 100 * evaluate(calibrated, shown.labels, shown.class_counts).balanced

        inside, rest = some(held_out), some(~held_out)
        auto = MARC("auto")
        one = processor_seconds(lambda: MARC().fit(fitted_on))
        chosen = processor_seconds(lambda auto=auto, inside=inside: auto.fit(fitted_on, validation=inside))
        whole = processor_seconds(lambda: MARC().fit_path(fitted_on))
        best = max(path, key=lambda gamma: (round(score(path[gamma], inside), 9), -abs(gamma - 1.2)))
        rows.append(
            {
                "held-out images": size,
                "seed": seed,
                'gamma="auto"': auto.gamma_,
                "of all gammas": best,
                "score on the rest": score(auto, rest),
                "of the best of all": score(path[best], rest),
                "auto / one solve": chosen / one,
                "fit_path / one solve": whole / one,
            }
        )
    write_results(
        "gamma_cost",
        "What choosing gamma costs",
        rows,
        "CIFAR-10-LT 100, features of a ResNet-32. Ratios of processor time, each in turns with the solve beside it; "
        "`fit_path` solves for 21 gammas to the full tolerance. Asked for: ≤ 5 for both.",
    )


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
    price(fitted_on, outputs(arrays["test"], test_labels, "test"))
    rows: list[dict[str, object]] = []
    for gamma in GAMMAS:
        method = MARC(gamma).fit(fitted_on)
        scores = {}
        for name, shown in seen.items():
            scores[name] = 100 * evaluate(np.asarray(method.transform(shown)), shown.labels, counts).balanced
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
        f"a weaker correction of the tail than it needs. {notes}",
        chosen={name: row["gamma"] for name, row in chosen.items()},
    )


if __name__ == "__main__":
    main()
