"""What one may choose about the prefix cache."""

from dataclasses import dataclass

from ..errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """How prefixes are cached."""

    prefix_caching: bool = True
    snapshot_share: float = 0.5  # of the memory, for saved states
    pinned_share: float = 0.1  # of the memory, for blocks that requests pin

    def __post_init__(self):
        for field in ("snapshot_share", "pinned_share"):
            if not 0 <= getattr(self, field) <= 1:
                raise InvalidSetting(f"{field} must be between 0 and 1, got {getattr(self, field)}", field=field)
