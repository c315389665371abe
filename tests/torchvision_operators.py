"""Operators that a torchvision wheel built for another torch lacks, declared while it is imported.

Without them `import torchvision` fails, and with it timm and transformers, although their networks never use them.
`conftest.py` runs this file; the library does not.
"""

import importlib.abc
import sys
from typing import Any

OPERATORS = ("nms", "qnms")
DECLARED = []  # a declaration lasts as long as its object


class MissingOperators(importlib.abc.MetaPathFinder):
    """Steps in after torchvision has tried to load its own operators, before it speaks of them; finds nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision._meta_registrations":
            return
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        DECLARED.append(library)
        for operator in OPERATORS:
            if not hasattr(torch.ops.torchvision, operator):
                library.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")


sys.meta_path.insert(0, MissingOperators())
