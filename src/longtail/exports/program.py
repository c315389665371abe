"""A `torch.export` program: a .pt2 file that torch runs without this library and without the model's source."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from longtail.core.files import replacing
from longtail.errors import UserError
from longtail.exports.network import Deployment
from longtail.runs.folder import Run

NOTES = "longtail.json"


def write_program(source: Path, out: Path, with_preprocessing: bool = False) -> tuple[float, str]:
    """Write the file, read it back and compare its logits."""
    if out.suffix != ".pt2":
        raise UserError(f"torch reads such a program only from a file called ….pt2; choose --out {out.name}.pt2")
    deployment = Deployment.of_run(Run.open(source), with_preprocessing)
    with replacing(out) as temporary, TemporaryDirectory(dir=temporary.parent) as folder:
        archive = Path(folder) / out.name
        torch.export.save(deployment.program(), archive, extra_files={NOTES: json.dumps(deployment.details)})
        difference = deployment.compare(torch.export.load(archive).module(), "torch.export program")
        archive.replace(temporary)
    load = f"torch.export.load({str(out)!r}).module()(images)"
    return difference, f"{load} takes {deployment.details['input']}; {deployment.instructions}"
