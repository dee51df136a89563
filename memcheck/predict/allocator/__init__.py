"""Models of the allocators: the same requests in the same order give the same counters."""

from memcheck.predict.allocator.blocks import BLOCK, MIB, Block, rounded_up
from memcheck.predict.allocator.caching import CachingAllocator
from memcheck.predict.allocator.plain import Count, OutOfMemory, PlainAllocator
from memcheck.predict.allocator.settings import AllocatorSettings, Order

__all__ = [
    "BLOCK",
    "MIB",
    "AllocatorSettings",
    "Block",
    "CachingAllocator",
    "Count",
    "Order",
    "OutOfMemory",
    "PlainAllocator",
    "rounded_up",
]
