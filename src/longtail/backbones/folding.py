"""Folds batch-norm into the convolution before it, for faster inference.

In evaluation mode convolution and batch-norm are both linear, so the outputs differ by rounding only; a ResNet-32
saves about a tenth of its time.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval


def folded(network: nn.Module) -> nn.Module:
    """A copy in evaluation mode without the batch-norms that follow a convolution.

    It is known which layers follow each other in an `nn.Sequential` and in our own backbones, whose modules
    are listed in the order in which they run. Other modules are not changed.
    """
    copy = deepcopy(network)
    copy.eval()
    for module in list(copy.modules()):
        if not (isinstance(module, nn.Sequential) or type(module).__module__.startswith("longtail.backbones")):
            continue
        for (name, layer), (next_name, following) in pairwise(list(module.named_children())):
            if isinstance(layer, nn.Conv2d) and isinstance(following, nn.BatchNorm2d):
                setattr(module, name, fuse_conv_bn_eval(layer, following))
                setattr(module, next_name, nn.Identity())
    return copy
