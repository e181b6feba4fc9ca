"""`intarsia generate`: a running server is asked, and its answer is printed as it comes."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import InvalidRequest
from ...proto.request import RequestOptions, SamplingParams
from ..client import Client, Tls, Usage


class Server(NamedTuple):
    """Which server is asked, and how."""

    address: str
    api_key: str | None
    ca_certs: str | None

    def connect(self) -> Client:
        tls = Tls(ca_certs=self.ca_certs) if self.ca_certs is not None else None
        return Client(self.address, api_key=self.api_key, tls=tls)


def run(
    server: Server,
    prompt: str | None,
    token_ids: str | None,
    images: Sequence[Path],
    options: RequestOptions,
    sampling: dict[str, Any],
) -> None:
    """Print one answer: text for a text, token ids for token ids.

    sampling: fields of `SamplingParams`; those that are None are as the checkpoint asks
    """
    given = {name: value for name, value in sampling.items() if value is not None}
    SamplingParams(**given)  # raises for wrong values before a server is asked
    asked = _prompt(prompt, token_ids)
    with server.connect() as client:
        params, usage = client.model_info().sampling(**given), None
        for chunk in client.generate(asked, params, images=[_read(path) for path in images], options=options):
            text = chunk.text if isinstance(asked, str) else "".join(f"{token} " for token in chunk.token_ids)
            print(text, end="", flush=True)
            usage = chunk.usage or usage
        print()
    if usage:
        _print_usage(usage)


def _print_usage(usage: Usage) -> None:
    print(
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} generated",
        file=sys.stderr,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="images") from None


def _prompt(text: str | None, token_ids: str | None) -> str | list[int]:
    if (text is None) == (token_ids is None):
        raise InvalidRequest("give either a PROMPT or --token-ids", field="prompt")
    if text is not None:
        return text
    try:
        ids = [int(part) for part in (token_ids or "").split(",") if part.strip()]
    except ValueError:
        ids = [-1]
    if any(not 0 <= token < 2**32 for token in ids):
        raise InvalidRequest(
            f"--token-ids must be whole numbers from 0 on, separated by commas; got {token_ids!r}", field="token_ids"
        )
    return ids
