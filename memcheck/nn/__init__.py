"""Modules: self-attention with its projections inside, the combinator, the projections alone, and a decoder of them."""

from memcheck.nn.combinator import Combinator
from memcheck.nn.compressed_attention import CompressedSelfAttention
from memcheck.nn.decoder import Decoder
from memcheck.nn.linear_attention import LinearSelfAttention
from memcheck.nn.projection import KeyProjection, OutProjection, QueryProjection, ValueProjection
from memcheck.nn.softplus_attention import SoftplusSelfAttention, heuristic_core_dim

__all__ = [
    "Combinator",
    "CompressedSelfAttention",
    "Decoder",
    "KeyProjection",
    "LinearSelfAttention",
    "OutProjection",
    "QueryProjection",
    "SoftplusSelfAttention",
    "ValueProjection",
    "heuristic_core_dim",
]
