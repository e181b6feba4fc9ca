"""What tenants may lease. How much of the memory is there for all leases together, the memory plan says."""

from dataclasses import dataclass

from ...errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Limits of leases."""

    share_per_tenant: float | None = None  # of the cache memory, for the leases of one tenant; None: all of lease_share
    longest_s: float = 3600.0  # of one lease

    def __post_init__(self):
        share = self.share_per_tenant
        if share is not None and not 0 < share <= 1:
            raise InvalidSetting(
                f"lease_share_per_tenant must be more than 0 and at most 1, got {share}", field="lease_share_per_tenant"
            )
        if not self.longest_s > 0:
            raise InvalidSetting(f"max_lease_s must be more than 0 seconds, got {self.longest_s}", field="max_lease_s")
