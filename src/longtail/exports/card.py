"""Weights as safetensors with a model card: a folder that can be loaded again, or uploaded to the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from longtail.backbones.library import library_of
from longtail.data.splits import image_side, statistics
from longtail.errors import UserError
from longtail.files.atomic import replacing_folder, write_json, write_text
from longtail.files.records import read_json
from longtail.files.text import markdown_text, visible
from longtail.methods import TRAIN_METHODS
from longtail.metrics.scores import FEW, MANY
from longtail.metrics.table import SCORES
from longtail.runs.folder import Run, write_model
from longtail.runs.prediction import in_words
from longtail.runs.record import CALIBRATION_FILE, METRICS_FILE, MODEL_FILE, RUN_FILE, read_journal, scores_in
from longtail.tasks.calibration import OWN_FILES, ScoresFile, fitted_value, read_calibration, read_scores
from longtail.tasks.tables import markdown_table

SHOWN_CLASSES = 100


def write_package(source: Path, out: Path) -> tuple[None, str]:
    """A folder with model.safetensors, run.json and README.md; it is a run folder itself."""
    run = Run.open(source)
    model = run.model()  # raises if the weights cannot be loaded
    card = model_card(run)
    with replacing_folder(out, (*OWN_FILES, CARD_FILE), "a model") as folder:
        write_model(folder / MODEL_FILE, model, run.record, {"class_names": run.class_names})
        write_text(folder / CARD_FILE, card)
        if run.calibration:
            read_calibration(source, model=run.model_identity)
            write_text(folder / CALIBRATION_FILE, (source / CALIBRATION_FILE).read_text(encoding="utf-8"))
        write_json(folder / RUN_FILE, _without_paths(run).to_dict())
    return None, f"load it with longtail.load({str(out)!r})"


def _without_paths(run: Run) -> Any:
    """The record of a run without paths of the machine it was trained on."""
    record = run.record
    origin = record.calibration and replace(record.calibration, run=Path(record.calibration.run).name)
    return replace(record, command=[], config={**record.config, "root": None, "weights": None}, calibration=origin)


def model_card(run: Run) -> str:
    """The model card in Markdown: data, method, scores, classes, how to load."""
    title = f"{run.config.backbone} on {markdown_text(run.data_name)}"
    if run.calibration:
        title += f", calibrated with {markdown_text(run.calibration.title)}"
    rows = _measured(run)
    kind = "calibrated" if run.calibration else "stage one"
    results = [(split, scores) for split, model, scores in rows if model == kind]
    fields = front_matter(f"{run.config.backbone}-{run.data_name}", results, data=run.data_name)
    sections = [fields, f"# {title}", _data(run), _method(run), _scores(run, rows), _loading(run), _classes(run)]
    return "\n\n".join(sections) + "\n"


def _data(run: Run) -> str:
    counts = run.group_counts
    sizes = ", ".join(f"{count} {split}" for split, count in run.split_sizes.items())
    cut = ""
    if run.config.profile != "none":
        cut = f" Its tail was cut to the profile `{run.config.profile}`, factor {run.config.imbalance:g}."
    return (
        f"## Data\n\n{markdown_text(run.data_name)}: {len(counts)} classes; images: {sizes}. The largest class has "
        f"{counts.max()} training images, the smallest {counts.min()} (imbalance factor "
        f"{counts.max() / max(counts.min(), 1):.1f}).{cut}"
    )


def _method(run: Run) -> str:
    method, config = TRAIN_METHODS[run.config.method], run.config
    length = f"{config.epochs:g} epochs" if config.epochs else f"{config.iterations} steps"
    text = (
        f"## Method\n\nStage one: {method.title} ({method.paper}), {config.backbone}, {length}, batch "
        f"{config.batch_size}, {config.optimizer}, learning rate {config.lr:g}, seed {config.seed}."
    )
    if run.is_frozen:
        text = f"## Method\n\nStage one: {config.backbone}, frozen; its head is Probe, fitted on the features."
    if library_of(config.backbone) or config.train != "all":
        start = "given" if config.weights else "published" if config.pretrained else "random"
        text += f" It started from {start} weights; trained: {config.train}."
    if run.calibration:
        described, numbers = read_calibration(run.folder, model=run.model_identity)
        chosen = {
            name: value for name, value in {**described.settings, **described.chosen}.items() if value is not None
        }
        settings = markdown_text(", ".join(f"{name} {value}" for name, value in chosen.items()))
        paper = f" ({markdown_text(described.paper)})" if described.paper else ""
        text += (
            f"\n\nStage two: {markdown_text(described.title)}{paper}; {settings}. Fitted on "
            f"{markdown_text(described.fitted_on.in_words())}; the backbone is that of stage one."
        )
        if held_out := fitted_value(numbers, "held_out_"):
            text += f" Images the network has not seen: {markdown_text(str(held_out))}."
    return text


def _scores(run: Run, measured: list[tuple[str, str, dict[str, Any]]]) -> str:
    if not measured:
        return "## Scores\n\nNot measured yet: `longtail evaluate` measures them."
    rows = [
        [split, model, *(one.show(scores.get(key)) for key, one in SCORES.items())] for split, model, scores in measured
    ]
    table = markdown_table(["split", "model", *(score.heading for score in SCORES.values())], rows)
    plain = ", ".join(score.heading for score in SCORES.values() if not score.in_percent)
    shots = f"Classes with more than {MANY} training images are many-shot, with fewer than {FEW} few-shot."
    return "\n".join(["## Scores", "", *table, "", f"Per cent, but {plain}. {shots}{_remarks(run)}"])


def _remarks(run: Run) -> str:
    """Which scores are higher than on new images, and the classes whose accuracy fell by more than their interval."""
    validation, text = _both(run, "validation"), ""
    if validation and validation.used:
        text = (
            " The calibration was fitted or chosen on the validation images: its score there is higher than on new "
            "images."
        )
    both = _both(run, "test") or validation
    if both:
        fallen = ", ".join(markdown_text(str(one)) for one in both.fallen) or "none"
        text += f"\n\nRecognised less often than before, by more than their interval ({both.split} split): {fallen}."
    return text


def _measured(run: Run) -> list[tuple[str, str, dict[str, Any]]]:
    """(split, model, scores) in the run's folder; scores of other weights are left out."""
    rows: list[tuple[str, str, dict[str, Any]]] = []
    kind = "calibrated" if run.calibration else "stage one"
    for split in ("validation", "test"):
        both, path = _both(run, split), run.folder / f"metrics-{split}.json"
        alone = read_json(path) if path.is_file() and not both else {}
        if both:
            rows += [(split, "stage one", both.before), (split, "calibrated", both.after)]
        elif alone.get("model") == run.model_identity:
            rows.append((split, kind, alone))
    if not any(split == "validation" for split, _, _ in rows):
        evaluated = [line.validation for line in read_journal(run.folder / METRICS_FILE) if line.validation]
        rows = [("validation", "stage one", dict(evaluated[-1])), *rows] if evaluated else rows
    return [(split, model, scores_in(scores, run.folder)) for split, model, scores in rows]


def _both(run: Run, split: str) -> ScoresFile | None:
    """The scores before and after a calibration, if they belong to this model."""
    return read_scores(run.folder / f"before-after-{split}.json", run.model_identity)


def _loading(run: Run) -> str:
    side, channels = image_side(run.config), run.channels
    mean, std = statistics(run.config)
    return f"""## How to load

```python
import longtail

model = longtail.load(".")  # the folder of this file
found = model.predict(images)  # paths of images or folders, Pillow images, or uint8 arrays
print(found.names, found.probabilities)  # images are prepared inside
```

To run the network alone: `model.network(images)` takes images (N, {channels}, {side}, {side}) to logits
(N, {len(run.class_names)}). Prepare images like this: {in_words(run)}; subtract the mean {mean}; divide by {std}.
`longtail export` makes ONNX and `torch.export` files that hold the normalisation too, and with
`--with-preprocessing` the resizing."""


def _classes(run: Run) -> str:
    counts, names = run.group_counts, run.class_names
    order = np.argsort(-counts, kind="stable")
    lines = [f"| {label} | {markdown_text(names[label])} | {counts[label]} |" for label in order[:SHOWN_CLASSES]]
    left = len(order) - SHOWN_CLASSES
    more = f"\n\nand {left} smaller classes: see `data` in `{RUN_FILE}`." if left > 0 else ""
    return "## Classes\n\n| label | name | training images |\n|---:|---|---:|\n" + "\n".join(lines) + more


CARD_FILE = "README.md"
TAGS = ("long-tailed-recognition", "class-imbalance", "calibration")
# The Hub's names of our scores, where it has one.
METRIC_TYPES = {"top1": "accuracy", "macro_f1": "f1", "brier": "brier_score"}


def front_matter(
    name: str,
    results: Sequence[tuple[str, Mapping[str, float | None]]] = (),
    *,
    data: str = "",
    library: str = "longtail",
    license: str | None = None,
    datasets: Sequence[str] = (),
) -> str:
    """The fields of a model card, as the Hub reads them (YAML; values are JSON, which is YAML too).

    Args:
        name: of the model, for its measured results.
        results: (split, scores) that were measured; scores of value None are left out.
        data: name of the data set of these results (default: the first of `datasets`).
        library: that loads the model.
        license: identifier of the Hub, such as mit or cc-by-4.0.
        datasets: identifiers of the training data on the Hub.

    >>> print(front_matter("m", license="mit").splitlines()[3])
    license: "mit"
    """
    data = data or (datasets[0] if datasets else "unknown")
    fields: dict[str, Any] = {"license": license, "datasets": list(datasets)}
    if results:
        fields["model-index"] = [{"name": name, "results": [_result(data, *result) for result in results]}]
    lines = ["---", f"library_name: {library}", "pipeline_tag: image-classification"]
    lines += [f"{key}: {visible(json.dumps(value, ensure_ascii=False))}" for key, value in fields.items() if value]
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in TAGS), "---"])


def _result(data: str, split: str, scores: Mapping[str, float | None]) -> dict[str, Any]:
    """One entry of `model-index`: the scores of a split, as shares."""
    metrics = [
        {"type": METRIC_TYPES.get(name, name), "name": score.heading, "value": round(value, 6)}
        for name, score in SCORES.items()
        if (value := scores.get(name)) is not None
    ]
    dataset = {"name": data, "type": data.lower(), "split": split}
    return {"task": {"type": "image-classification"}, "dataset": dataset, "metrics": metrics}


def push_to_hub(folder: Path | str, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
    """Upload a folder with a model card, of `save_pretrained` or `longtail export --format safetensors`.

    Args:
        folder: of the model.
        repo_id: `user/name` on the Hub; made if it does not exist.
        private: whether a new repository is private (default: as the Hub decides).
        token: of the Hub (default: that of `hf auth login`).

    Returns:
        the address of the upload.
    """
    folder = Path(folder)
    if not (folder / CARD_FILE).is_file():
        raise UserError(f"{folder} has no {CARD_FILE}; write it with save_pretrained or longtail export first")
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise UserError("push_to_hub needs huggingface_hub: pip install 'longtail[hf]'") from error
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload a calibrated model"))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder} could not be uploaded to {repo_id}: {reason}") from error
