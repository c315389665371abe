"""The Hugging Face Hub: the fields of a model card, and the upload of a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longtail.errors import UserError
from longtail.files.text import visible
from longtail.metrics.table import SCORES

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
