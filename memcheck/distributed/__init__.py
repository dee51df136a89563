"""The attentions on sequences that are split over processes, each with the arguments of its local function.

Every rank of the group holds one slice of each sequence, in the order of the ranks. States of constant size travel, not
keys and values (compressed attention: the means of blocks, and the positions of a window).
"""

from memcheck.distributed.compressed_attention import compressed_attention
from memcheck.distributed.linear_attention import linear_attention
from memcheck.distributed.softplus_attention import softplus_attention
from memcheck.ops import sharding as sharding  # registers how DTensors run

__all__ = ["compressed_attention", "linear_attention", "softplus_attention"]
