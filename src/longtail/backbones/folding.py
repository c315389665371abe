"""A network for inference: batch-norm, fixed in evaluation mode, becomes part of the convolution before it.

Convolution and batch-norm are both linear, so the answers differ by rounding only; a ResNet-32
saves about a tenth of its time.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval


def folded(network: nn.Module) -> nn.Module:
    """A copy in evaluation mode without the batch-norms that follow a convolution.

    Which layers follow each other is known in an `nn.Sequential`, and in our own backbones, whose
    modules stand in the order in which they run. Everything else stays as it is.
    """
    copy = deepcopy(network)
    copy.eval()
    for module in list(copy.modules()):
        if not (isinstance(module, nn.Sequential) or type(module).__module__.startswith(__package__)):
            continue
        for (name, layer), (next_name, following) in pairwise(list(module.named_children())):
            if isinstance(layer, nn.Conv2d) and isinstance(following, nn.BatchNorm2d):
                setattr(module, name, fuse_conv_bn_eval(layer, following))
                setattr(module, next_name, nn.Identity())
    return copy
