"""Ids of the cache. They are types of their own, so that no id is taken for another one, for a count or for a size."""

from typing import NewType

BlockId = NewType("BlockId", int)
"""Counts within a group: block 5 of one group and block 5 of another may lie in different large pages."""

RequestId = NewType("RequestId", int)

NULL_BLOCK = BlockId(0)
"""Stands in block tables for tokens that no later token reads. It is never allocated; its page holds garbage."""
