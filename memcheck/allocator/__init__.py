"""Models of the allocators: the same requests in the same order give the same counters. It imports core alone."""

from memcheck.allocator.blocks import MIB, Block, OutOfMemory, PlainAllocator, rounded_up
from memcheck.allocator.caching import CachingAllocator
from memcheck.allocator.settings import AllocatorSettings, Order

__all__ = ["MIB", "AllocatorSettings", "Block", "CachingAllocator", "Order"]
__all__ += ["OutOfMemory", "PlainAllocator", "rounded_up"]
