"""Train the networks of the paper's table, one after another, at the lowest priority; it can be stopped at any time.

    python benchmarks/training_queue.py --root data --work ~/queue  # called again, it goes on
    python benchmarks/training_queue.py --work ~/queue --status     # what is done, and what it took

Two lanes train at the same time, one thread each: the paper's own budget (13,000 steps of 512 images), and 200 epochs.
Each network is one call of `longtail train`, so an interrupted one resumes from its checkpoint. Start the queue from an
installed copy of the library, so that changes of the source do not disturb it. `benchmarks/release.py` puts
finished networks into released/.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SETS = ("cifar100-lt-100", "cifar10-lt-100", "cifar100-lt-200", "cifar10-lt-200")
# The rows of Table 2 that are trained from the start, then the library's other stage-one methods.
STAGE_ONE = (
    *("cbs", "cbw", "class-balanced", "focal", "lade", "ldam", "equalization", "balanced-softmax", "bbn", "hybrid-sc"),
    *("seesaw", "oltr", "causal-norm", "logit-adjusted"),
)
# The recipe as it is; 2 % of the images are held out, so that methods that need unseen images have some.
PAPER = {"precision": "bf16", "validation": "0.02", "evaluate-every": "20", "checkpoint-every": "2"}
# A third of the paper's images.
LONG = {
    "epochs": "200",
    "batch-size": "128",
    "lr": "0.1",
    "warmup": "450",
    "precision": "bf16",
    "evaluate-every": "20",
    "checkpoint-every": "2",
}


@dataclass(frozen=True)
class Job:
    """One network."""

    recipe: str
    budget: str
    method: str = "softmax"
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.recipe}-{self.budget}-{self.method}-seed{self.seed}"

    def arguments(self, folder: Path, root: str) -> list[str]:
        """Of `longtail`: a new run, or the one in the folder again."""
        settings = {"root": root, "method": self.method, "seed": str(self.seed), "device": "cpu"}
        settings |= PAPER if self.budget == "paper" else LONG
        again = ["--resume"] if (folder / "run.json").is_file() else []
        options = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return ["train", self.recipe, "--out", str(folder), *options, *again]


def lanes() -> list[list[Job]]:
    """The lists of networks, in the order in which they are trained."""
    paper = [Job(recipe, "paper") for recipe in SETS]
    seeds = [Job(recipe, "200epochs", seed=seed) for seed in range(3) for recipe in SETS]
    methods = [
        Job(recipe, "200epochs", method) for recipe in ("cifar100-lt-100", "cifar10-lt-100") for method in STAGE_ONE
    ]
    return [paper, [*seeds, *methods]]


class Queue:
    """Lanes that take the next network of their own list, then of the others'."""

    def __init__(self, work: Path, root: str) -> None:
        self.work, self.root = work, root
        self.waiting = [[job for job in lane if not self.is_done(job)] for lane in lanes()]
        self.choosing = threading.Lock()

    def is_done(self, job: Job) -> bool:
        return (self.work / job.name / "model.safetensors").is_file()

    def next(self, lane: int) -> Iterator[Job]:
        order = [self.waiting[lane], *(jobs for other, jobs in enumerate(self.waiting) if other != lane)]
        while True:
            with self.choosing:
                jobs = next((jobs for jobs in order if jobs), None)
                if jobs is None:
                    return
                job = jobs.pop(0)
            yield job

    def train(self, lane: int) -> None:
        for job in self.next(lane):
            folder = self.work / job.name
            command = [sys.executable, __file__, "--child", *job.arguments(folder, self.root)]
            with (self.work / f"{job.name}.log").open("ab") as log:
                code = subprocess.call(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
            print(f"{job.name}: {'done' if self.is_done(job) else f'ended with exit code {code}'}", flush=True)

    def run(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        threads = [threading.Thread(target=self.train, args=(lane,)) for lane in range(len(self.waiting))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def child(arguments: list[str]) -> int:
    """One call of `longtail` at the lowest priority; its processor seconds are added up beside the run."""
    os.nice(19)
    from longtail.cli.main import main as longtail

    code = longtail(arguments)
    folder = Path(arguments[arguments.index("--out") + 1])
    spent = folder.with_suffix(".seconds.json")
    before = json.loads(spent.read_text()) if spent.is_file() else 0.0
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent.write_text(json.dumps(before + sum(own.ru_utime + own.ru_stime for own in used)))
    return code


def status(work: Path) -> None:
    for job in (job for lane in lanes() for job in lane):
        folder = work / job.name
        if not folder.is_dir():
            continue
        spent = folder.with_suffix(".seconds.json")
        hours = f"{json.loads(spent.read_text()) / 3600:.2f} processor hours" if spent.is_file() else "running"
        lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").is_file() else []
        step = json.loads(lines[-1]).get("step") if lines else 0
        print(f"{job.name}: {'done' if (folder / 'model.safetensors').is_file() else f'step {step}'}, {hours}")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="folder of CIFAR")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--status", action="store_true", help="print what is done, train nothing")
    arguments = parser.parse_args()
    if arguments.status:
        status(arguments.work)
    else:
        Queue(arguments.work, arguments.root).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
