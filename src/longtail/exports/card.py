"""Weights as safetensors with a model card: a folder to keep, to share, and to load again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from longtail.core.files import write_json, write_text
from longtail.core.tensors import read_tensors, write_tensors
from longtail.core.text import percent
from longtail.data.open import image_side, statistics
from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS
from longtail.metrics.scores import SHOTS
from longtail.runs.folder import METRICS_FILE, MODEL_FILE, RUN_FILE, Run
from longtail.tasks.calibrate import CALIBRATION_FILE

SHOWN_CLASSES = 100
SCORES = {"top1": "top-1", "balanced": "balanced", **dict(zip(SHOTS, SHOTS, strict=True)), "macro_f1": "macro F1"}


def write_package(source: Path, out: Path) -> tuple[None, str]:
    """A folder with model.safetensors, run.json and README.md; it is a run folder itself."""
    run = Run.open(source)
    run.load_model()  # only weights that load are worth sharing
    weights, _ = read_tensors(run.model_path)
    card = model_card(run)
    # No paths of the machine it was trained on.
    details = {key: value for key, value in run.details.items() if key != "command"}
    details["config"] = {**details["config"], "root": None, "weights": None}
    if calibration := details.get("calibration"):
        details["calibration"] = {**calibration, "from": Path(calibration["from"]).name}
    write_tensors(out / MODEL_FILE, weights, {"class_names": run.class_names})
    write_text(out / "README.md", card)
    if (source / CALIBRATION_FILE).is_file():
        write_text(out / CALIBRATION_FILE, (source / CALIBRATION_FILE).read_text(encoding="utf-8"))
    write_json(out / RUN_FILE, details)
    return None, f"load it with longtail.Run.open({str(out)!r}).load_model()"


def model_card(run: Run) -> str:
    """What the model is, in Markdown: data, method, scores, classes, how to load."""
    calibration = run.details.get("calibration")
    title = f"{run.config.backbone} on {run.details['data']['name']}"
    if calibration:
        title += f", calibrated with {POSTHOC_METHODS[calibration['method']].title}"
    sections = [_front_matter(), f"# {title}", _data(run), _method(run), _scores(run), _loading(run), _classes(run)]
    return "\n\n".join(sections) + "\n"


def _front_matter() -> str:
    tags = ("long-tailed-recognition", "class-imbalance", "calibration")
    lines = ["---", "library_name: longtail", "pipeline_tag: image-classification", "tags:"]
    return "\n".join([*lines, *(f"- {tag}" for tag in tags), "---"])


def _data(run: Run) -> str:
    counts, images = run.class_counts, run.details["data"]["images"]
    sizes = ", ".join(f"{count} {split}" for split, count in images.items())
    cut = ""
    if run.config.profile != "none":
        cut = f" Its tail was cut to the profile `{run.config.profile}`, factor {run.config.imbalance:g}."
    return (
        f"## Data\n\n`{run.details['data']['name']}`: {len(counts)} classes; images: {sizes}. The largest class has "
        f"{counts.max()} training images, the smallest {counts.min()} (imbalance factor "
        f"{counts.max() / counts.min():.1f}).{cut}"
    )


def _method(run: Run) -> str:
    method, config = TRAIN_METHODS[run.config.method], run.config
    length = f"{config.epochs:g} epochs" if config.epochs else f"{config.iterations} steps"
    text = (
        f"## Method\n\nStage one: {method.title} ({method.paper}), {config.backbone}, {length}, batch "
        f"{config.batch_size}, learning rate {config.lr:g}, seed {config.seed}."
    )
    if calibration := run.details.get("calibration"):
        posthoc = POSTHOC_METHODS[calibration["method"]]
        described = json.loads((run.folder / CALIBRATION_FILE).read_text(encoding="utf-8"))
        settings = ", ".join(f"{name} {value}" for name, value in described["settings"].items() if value is not None)
        text += (
            f"\n\nStage two: {posthoc.title} ({posthoc.paper}); {settings}. Fitted on "
            f"{described['fitted_on']['samples']} outputs of the {described['fitted_on']['split']} split; "
            "the backbone is that of stage one."
        )
    return text


def _scores(run: Run) -> str:
    header = "| split | model | " + " | ".join(SCORES.values()) + " | ECE |\n|---|---|" + "---:|" * (len(SCORES) + 1)
    rows = [_row(*row) for row in _known_scores(run)]
    if not rows:
        return "## Scores\n\nNot measured yet: `longtail evaluate` measures them."
    legend = "Per cent. Classes with more than 100 training images are many-shot, with fewer than 20 few-shot."
    return "## Scores\n\n" + "\n".join([header, *rows]) + f"\n\n{legend}"


def _row(split: str, model: str, scores: dict[str, Any]) -> str:
    cells = [percent(scores.get(name)) for name in SCORES]
    ece = percent(scores["ece"]) if "ece" in scores else ""
    return f"| {split} | {model} | " + " | ".join([*cells, ece]) + " |"


def _known_scores(run: Run) -> list[tuple[str, str, dict[str, Any]]]:
    """(split, model, scores) that the run's folder holds; of other weights than these, none."""
    rows = []
    for split in ("validation", "test"):
        both = run.folder / f"before-after-{split}.json"
        alone = run.folder / f"metrics-{split}.json"
        if both.is_file():
            scores = json.loads(both.read_text(encoding="utf-8"))
            rows += [(split, name, scores[key]) for name, key in (("stage one", "before"), ("calibrated", "after"))]
        elif alone.is_file() and (scores := json.loads(alone.read_text(encoding="utf-8")))["model"] == run.model_hash():
            rows.append((split, "stage one", scores))
    journal = run.folder / METRICS_FILE
    if not any(split == "validation" for split, _, _ in rows) and journal.is_file():
        lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
        evaluated = [line["validation"] for line in lines if line.get("validation")]
        rows = [("validation", "stage one", evaluated[-1]), *rows] if evaluated else rows
    return rows


def _loading(run: Run) -> str:
    side, channels = image_side(run.config), run.details["data"]["channels"]
    mean, std = statistics(run.config.data)
    return f"""## How to load

```python
import longtail

run = longtail.Run.open(".")  # the folder of this file
model = run.load_model()
logits = model(images)  # (N, {channels}, {side}, {side}) to (N, {len(run.class_names)})
```

Images are pixels from 0 to 1, minus mean {mean}, divided by {std}. The classes are `run.class_names`.
`longtail export` makes ONNX and `torch.export` files that hold the normalisation too."""


def _classes(run: Run) -> str:
    counts, names = run.class_counts, run.class_names
    order = np.argsort(-counts, kind="stable")
    lines = [f"| {label} | {_cell(names[label])} | {counts[label]} |" for label in order[:SHOWN_CLASSES]]
    left = len(order) - SHOWN_CLASSES
    more = f"\n\nand {left} smaller classes: see `data` in `{RUN_FILE}`." if left > 0 else ""
    return "## Classes\n\n| label | name | training images |\n|---:|---|---:|\n" + "\n".join(lines) + more


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
