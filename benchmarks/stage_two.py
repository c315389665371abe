"""cRT, LWS and DisAlign on stored outputs beside their authors' way, through the network.

The authors run every batch of stage two through the frozen network: cRT and LWS with class-balanced
batches, DisAlign with instance-balanced ones and its re-weighted loss. Here the same steps are made
through the network (cRT and LWS share its passes, each is charged for them), and `longtail` fits the
same methods on one augmented view stored once. Accuracy is balanced accuracy on the test split.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import cifar_root, write_results
from torch import Tensor, nn

from longtail import Outputs
from longtail.data.loading import Sampler, load
from longtail.heads.fold import head_of
from longtail.metrics.scores import evaluate
from longtail.posthoc import CRT, LWS, DisAlign
from longtail.posthoc.marc import class_weights
from longtail.runs.folder import Run
from longtail.runs.network import write_outputs

BATCH = 512
Head = Callable[[Tensor], Tensor]


class Aligned(nn.Module):
    """DisAlign's calibration: `s (a_j eta_j + b_j) + (1 - s) eta_j` with `s = sigmoid(v f + c)`."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head.requires_grad_(False)
        self.confidence = nn.Linear(head.in_features, 1)
        self.scale = nn.Parameter(torch.ones(head.out_features))
        self.shift = nn.Parameter(torch.zeros(head.out_features))

    def forward(self, features: Tensor) -> Tensor:
        logits, share = self.head(features), self.confidence(features).sigmoid()
        return share * (self.scale * logits + self.shift) + (1 - share) * logits


class Scaled(nn.Module):
    """LWS: one trained scale per class on the frozen head's class vectors."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(head.out_features))

    def forward(self, features: Tensor) -> Tensor:
        return self.head(features) * self.scale


def through_the_network(
    run: Run, sampler: str, heads: dict[str, tuple[nn.Module, float]], weights: Tensor | None, steps: int
) -> float:
    """Train heads on the same batches through the frozen network; returns its seconds, heads excluded."""
    run = run.using(root=str(cifar_root()))
    splits = run.splits
    augmenting, _ = run.transforms()
    model = run.model().eval()
    batches = Sampler(splits.train.labels.numpy(), sampler, seed=1)
    optimizers = {
        name: torch.optim.SGD([p for p in head.parameters() if p.requires_grad], lr, 0.9, weight_decay=5e-4)
        for name, (head, lr) in heads.items()
    }
    taken, mark = 0.0, time.perf_counter()
    for step, batch in enumerate(load(splits.train, augmenting, (batches.batch(s, BATCH) for s in range(steps)))):
        with torch.no_grad():
            features = model.backbone(batch.images)
        taken += time.perf_counter() - mark
        for name, (head, lr) in heads.items():
            optimizer = optimizers[name]
            optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
            optimizer.zero_grad()
            F.cross_entropy(head(features), batch.labels, weights, reduction="sum").div(len(batch.labels)).backward()
            optimizer.step()
        mark = time.perf_counter()
    return taken


def accuracy(logits: np.ndarray, outputs: Outputs) -> float:
    return 100 * evaluate(logits, outputs.labels, outputs.class_counts).balanced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a finished cifar10-lt-100 run")
    parser.add_argument("--steps", type=int, default=500, help="steps through the network; the time is scaled to 2,000")
    arguments = parser.parse_args()
    run, root = Run.open(arguments.run), str(cifar_root())
    test = run.using(root=root).outputs("test")
    features = torch.from_numpy(np.array(test.features))
    start = time.perf_counter()
    path = write_outputs(run.using(root=root), "train", arguments.run / "outputs" / "stage-two.safetensors", views=1)
    stored, once = Outputs.open(path), time.perf_counter() - start
    torch.manual_seed(0)

    def head() -> nn.Linear:
        return head_of(run.model())

    balanced = {"cRT": (nn.Linear(features.shape[1], test.num_classes), 0.1), "LWS": (Scaled(head()), 0.2)}
    instance = {"DisAlign": (Aligned(head()), 0.1)}
    weights = torch.from_numpy(class_weights(run.class_counts, DisAlign().gamma)).float()
    whole = 2000 / arguments.steps
    times = dict.fromkeys(balanced, whole * through_the_network(run, "class-balanced", balanced, None, arguments.steps))
    times |= dict.fromkeys(instance, whole * through_the_network(run, "instance", instance, weights, arguments.steps))
    rows: list[dict[str, object]] = []
    for name, method in (("cRT", CRT()), ("LWS", LWS()), ("DisAlign", DisAlign())):
        trained = (balanced | instance)[name][0]
        start = time.perf_counter()
        method.fit(stored)
        fit = time.perf_counter() - start
        with torch.no_grad():
            theirs = accuracy(trained(features).numpy(), test)
        ours = accuracy(np.asarray(method.transform(test)), test)
        rows.append(
            {
                "method": name,
                "through the network (s)": times[name],
                "extraction, once (s)": once,
                "fit (s)": fit,
                "times faster": times[name] / (once + fit),
                "accuracy through the network": theirs,
                "accuracy on stored outputs": ours,
                "difference": ours - theirs,
            }
        )
    path.unlink()
    write_results(
        "stage_two",
        "cRT, LWS and DisAlign: stored outputs beside the authors' way",
        rows,
        f"CIFAR-10-LT 100, ResNet-32; {arguments.steps} of 2,000 batches of {BATCH} were run through the network with "
        "the whole learning-rate schedule, and their time scaled up. Extraction is paid once for all methods.",
        softmax=round(accuracy(test.rows().read(slice(None)).numpy(), test), 2),
    )


if __name__ == "__main__":
    main()
