"""Where front ends (gRPC servers, Serve replicas, the offline API) connect to the engine.

A connection is also the front end's lease: when it closes, its requests are aborted and their blocks are free.

    front end -> engine   ["submit", id, tokens, sampling, images]   ["abort", id]
    engine -> front end   first the EngineInfo; then, once per step, [[id, delta or error], ...]
"""

from ..errors import IntarsiaError, InvalidRequest
from ..kvcache.manager import RequestId
from ..proto.channel import Address, ChannelClosed, Stream, StreamServer
from .engine import Engine, TokenDelta, TokenLogprobs
from .images import Image
from .request import SamplingParams

DELTA, ERROR = 0, 1


class FrontDoor:
    """Listens for front ends on behalf of one engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._server = StreamServer(self._serve)

    async def start(self, host: str) -> Address:
        return await self._server.start(host)

    async def close(self) -> None:
        await self._server.close()

    async def _serve(self, stream: Stream) -> None:
        stream.send_message(self._engine.info)
        requests: dict[str, RequestId] = {}

        def outlet(batch: list[tuple[str, TokenDelta | IntarsiaError]]) -> None:
            stream.send_message([_encode(external_id, item) for external_id, item in batch])
            for external_id, item in batch:
                if isinstance(item, IntarsiaError) or item.finish_reason is not None:
                    requests.pop(external_id, None)

        try:
            while True:
                verb, external_id, *rest = await stream.receive_message()
                if verb == "abort":
                    if external_id in requests:
                        self._engine.abort(requests.pop(external_id))
                    continue
                try:
                    if external_id in requests:
                        raise InvalidRequest(f"request id {external_id!r} is in use", field="request_id")
                    tokens, sampling, images = rest
                    params = SamplingParams(**sampling)
                    pictures = [Image(*image) for image in images]
                    requests[external_id] = self._engine.submit(tokens, params, external_id, outlet, pictures)
                except IntarsiaError as error:
                    stream.send_message([_encode(external_id, error)])
        except ChannelClosed:
            pass
        finally:
            for request_id in requests.values():
                self._engine.abort(request_id)


def _encode(external_id: str, item: TokenDelta | IntarsiaError) -> list:
    if isinstance(item, IntarsiaError):
        return [external_id, ERROR, item.to_wire()]
    return [external_id, DELTA, item]


def decode(entry: tuple) -> tuple[str, TokenDelta | IntarsiaError]:
    """One entry of the engine's message, for the other end."""
    external_id, tag, value = entry
    if tag == ERROR:
        return external_id, IntarsiaError.from_wire(value)
    token_ids, logprobs, finish_reason, num_cached_tokens = value
    rows = None if logprobs is None else tuple(TokenLogprobs(*row) for row in logprobs)
    return external_id, TokenDelta(token_ids, rows, finish_reason, num_cached_tokens)
