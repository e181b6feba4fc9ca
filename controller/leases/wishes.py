"""What becomes of the wish for a lease when its request comes."""

from ...errors import InvalidRequest
from ...proto.leases import OFF, LeaseReceipt
from ...proto.request import GenerateRequest
from .leases import Leases

LEASES_ARE_OFF = LeaseReceipt(refused=OFF)


def check_lease(asked: GenerateRequest, total_tokens: int, leases: Leases | None) -> LeaseReceipt | None:
    """What is known already of the lease that a request asks for: that there are none here. A wish that is not granted
    fails no request, unless that is worth nothing without it.

    total_tokens: that its conversation has at most. leases: None where they are off

    Raises `InvalidRequest` for what cannot be granted, `OverQuota` for what must be granted and cannot be now.
    """
    options, answers = asked.options, asked.sampling.n
    if answers > 1:
        raise InvalidRequest(
            f"keep_s keeps one conversation, and {answers} answers are asked for; ask for one", field="keep_s"
        )
    if leases is not None:
        if not asked.is_known:  # else another engine had taken it before it was lost
            leases.check(options, total_tokens)
        return None
    if options.keep_required:
        raise InvalidRequest(
            "leases are off here, and keep_required asks for one; start the server with --lease-share, or leave it out",
            field="keep_required",
        )
    return LEASES_ARE_OFF
