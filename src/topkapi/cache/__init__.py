"""Where cached tokens live: paged pools, their allocator, and the request-to-token table."""

from topkapi.cache.allocator import PageAllocator
from topkapi.cache.pool import NSATokenToKVPool, TokenRecords
from topkapi.cache.request_table import ReqToTokenPool

__all__ = ["NSATokenToKVPool", "PageAllocator", "ReqToTokenPool", "TokenRecords"]
