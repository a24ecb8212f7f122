"""Where cached tokens live: paged pools, their allocator, and the request-to-token table."""

from topkapi.cache.allocator import PageAllocator
from topkapi.cache.host_tier import HostTier
from topkapi.cache.leases import Lease, PageLeases
from topkapi.cache.pool import NSATokenToKVPool, TokenRecords
from topkapi.cache.prefix_tree import PrefixTree
from topkapi.cache.request_table import ReqToTokenPool

__all__ = [
    "HostTier",
    "Lease",
    "NSATokenToKVPool",
    "PageAllocator",
    "PageLeases",
    "PrefixTree",
    "ReqToTokenPool",
    "TokenRecords",
]
