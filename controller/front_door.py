"""Where front ends (gRPC servers, Serve replicas, the offline API) connect to the engine.

A connection is also the front end's lease: when it closes, its requests are aborted and their blocks are free.

    front end -> engine   ["submit", handle, tokens, sampling, images, terms, stream_interval_s]   ["abort", handle]
                          ["load", handle]
    engine -> front end   first the EngineInfo; then, per step, [handles, tokens, [[handle, tag, what], ...]], where
                          what is a delta, an error, or the answer to a question

Handles are numbers that the front end draws; a request for n answers takes n of them in a row.
"""

from ..errors import IntarsiaError
from ..kvcache.manager import RequestId
from ..proto.channel import Address, ChannelClosed, Stream, StreamServer
from .engine import Delivery, Engine, TokenDelta, TokenLogprobs
from .images import Image
from .info import EngineLoad
from .request import SamplingParams, Terms

DELTA, ERROR, LOAD = range(3)


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
        requests: dict[int, RequestId] = {}

        def outlet(delivery: Delivery) -> None:
            others = [_encode(handle, item) for handle, item in delivery.others]
            stream.send_message([delivery.handles, delivery.tokens, others])
            for handle, item in delivery.others:
                if isinstance(item, IntarsiaError) or item.finish_reason is not None:
                    requests.pop(handle, None)

        try:
            while True:
                verb, handle, *rest = await stream.receive_message()
                if verb == "abort":
                    if handle in requests:
                        self._engine.abort(requests.pop(handle))
                    continue
                if verb == "load":
                    stream.send_message([[], [], [[handle, LOAD, self._engine.load()]]])
                    continue
                try:
                    tokens, sampling, images, terms, stream_interval_s = rest
                    params = SamplingParams(**sampling)
                    pictures = [Image(*image) for image in images]
                    urgency = Terms(**terms)
                    ids = self._engine.submit(tokens, params, handle, outlet, pictures, urgency, stream_interval_s)
                    requests |= {handle + index: request_id for index, request_id in enumerate(ids)}
                except IntarsiaError as error:
                    stream.send_message([[], [], [_encode(handle, error)]])
        except ChannelClosed:
            pass
        finally:
            for request_id in requests.values():
                self._engine.abort(request_id)


def _encode(handle: int, item: TokenDelta | IntarsiaError) -> list:
    if isinstance(item, IntarsiaError):
        return [handle, ERROR, item.to_wire()]
    return [handle, DELTA, item]


def decode(entry: tuple) -> tuple[int, TokenDelta | IntarsiaError | EngineLoad]:
    """One of the last part of the engine's message, for the other end."""
    handle, tag, value = entry
    if tag == ERROR:
        return handle, IntarsiaError.from_wire(value)
    if tag == LOAD:
        return handle, EngineLoad(*value)
    delta = TokenDelta(*value)
    return handle, delta._replace(logprobs=_rows(delta.logprobs), prompt_logprobs=_rows(delta.prompt_logprobs))


def _rows(wire: tuple | None) -> tuple[TokenLogprobs, ...] | None:
    return None if wire is None else tuple(TokenLogprobs(*row) for row in wire)
