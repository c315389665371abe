"""How the cost of MARC's solve grows with the number of samples N, of classes K and of features D.

Synthetic features around class means with a long tail (imbalance 100), and the biased head of `calibrate.py`. One of
the three numbers is doubled several times while the others stay. Logits are either stored, so that D does not matter,
or computed from the features chunk by chunk. Processor time on one thread, the fastest of some turns in which all
sizes alternate; the slope is that of log time over log size by least squares: 1 is proportional.
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
import torch
from common import processor_seconds, write_results

from longtail import MARC, Outputs
from longtail.data.imbalance import long_tail_counts

IMBALANCE = 100.0
BASE = {"N": 20_000, "K": 100, "D": 64}
SIZES = {"N": (10_000, 20_000, 40_000, 80_000), "K": (50, 100, 200, 400), "D": (32, 64, 128, 256)}


def outputs(samples: int, classes: int, width: int, *, stored: bool) -> Outputs:
    """Outputs of a classifier that is biased to large classes, on about so many samples."""
    shape = long_tail_counts(classes, 100_000, IMBALANCE, "exp")
    counts = np.maximum((np.asarray(shape) * samples / np.sum(shape)).round().astype(np.int64), 1)
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(classes, width, generator=generator) * (64 / width) ** 0.5
    labels = np.repeat(np.arange(classes), counts)
    features = (0.3 * means[labels] + torch.randn(len(labels), width, generator=generator)).numpy()
    size = torch.from_numpy(counts / counts.max()).float()
    weight = (0.35 * means * (0.5 + 0.5 * size**0.15).unsqueeze(1)).numpy()
    bias = 0.3 * np.log(counts / counts.mean()).astype(np.float32)
    arrays = {"logits": features @ weight.T + bias} if stored else {"features": features}
    return Outputs(labels, counts, head_weight=weight, head_bias=bias, **arrays)


def slope(sizes: tuple[int, ...], seconds: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # also of a solve that does not converge
    rows: list[dict[str, object]] = []
    for stored in (True, False):
        for grown, sizes in SIZES.items():
            if stored and grown == "D":
                continue
            cases = [BASE | {grown: size} for size in sizes]
            data = [outputs(case["N"], case["K"], case["D"], stored=stored) for case in cases]
            passes: list[int] = []
            taken: list[list[float]] = []
            for _ in range(arguments.turns):
                methods = [MARC() for _ in data]
                taken.append(
                    [processor_seconds(lambda m=m, one=one: m.fit(one)) for m, one in zip(methods, data, strict=True)]
                )
                passes = [method.result_.iterations for method in methods]
            fastest = np.min(taken, axis=0).tolist()
            each = [seconds / number for seconds, number in zip(fastest, passes, strict=True)]
            rows.append(
                {
                    "logits": "stored" if stored else "from features",
                    "grown": grown,
                    "sizes": ", ".join(f"{size:,}" for size in sizes),
                    "seconds": ", ".join(f"{seconds:.2f}" for seconds in fastest),
                    "passes": ", ".join(map(str, passes)),
                    "slope of the solve": slope(sizes, fastest),
                    "slope of a pass": slope(sizes, each),
                }
            )
            print(rows[-1], flush=True)
    write_results(
        "growth",
        "How the cost of a calibration grows",
        rows,
        f"MARC on synthetic features with a long tail (imbalance {IMBALANCE:.0f}); where nothing else is said, "
        f"{BASE['N']:,} samples, {BASE['K']} classes, {BASE['D']} features. Processor time on one thread, the fastest "
        "of the turns. Slopes are of log time over log size: 1 is proportional. Problems above four million logits "
        "are worked in float32 and by way of parts of the rows, smaller ones in float64.",
        turns=arguments.turns,
    )


if __name__ == "__main__":
    main()
