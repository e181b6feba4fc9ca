"""What a request is called: the id that its answer, its line in the log and its errors share."""

from dataclasses import dataclass

REQUEST_ID = "intarsia.request_id"
"""The entry of a scope with the `Called` of its request."""


@dataclass
class Called:
    """What a request is called: drawn, or as its header or its body says."""

    id: str
