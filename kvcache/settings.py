"""What one may choose about the prefix cache."""

from dataclasses import dataclass

from ..errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """How prefixes are cached."""

    prefix_caching: bool = True
    pinned_share: float = 0.1  # of the memory, for blocks that requests pin

    def __post_init__(self):
        if not 0 <= self.pinned_share <= 1:
            raise InvalidSetting(f"pinned_share must be between 0 and 1, got {self.pinned_share}", field="pinned_share")
