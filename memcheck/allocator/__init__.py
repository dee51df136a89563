"""CUDA's caching allocator without a GPU: the same requests in the same order give the same counters.

It is the one of csrc/simulated, which simulated GPUs have, too.
"""

from memcheck.allocator.caching import MIB, AllocatorSettings, Block, CachingAllocator, Order, OutOfMemory

__all__ = ["MIB", "AllocatorSettings", "Block", "CachingAllocator", "Order", "OutOfMemory"]
