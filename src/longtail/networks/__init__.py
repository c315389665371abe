"""Methods that change the network: two branches, a contrastive one, a memory, a normalised head."""

from longtail.networks.bbn import BBN
from longtail.networks.causal_norm import CausalNorm
from longtail.networks.hybrid_sc import HybridSC
from longtail.networks.oltr import OLTR

__all__ = ["BBN", "OLTR", "CausalNorm", "HybridSC"]
