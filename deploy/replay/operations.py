"""Operation traces: what is asked of the manager, line by line, and what it answers.

One operation, one answer. An operation that cannot be done is answered with `ok: false` and the reason, and nothing
else is disturbed.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import IntarsiaError, InvalidRequest, InvalidSetting, PoolExhausted
from ...kvcache.hints import Retain
from ...kvcache.ids import BlockId, RequestId
from ...kvcache.lookup import Hit
from ...kvcache.manager import CacheManager
from ...kvcache.prefix import Encoder, TokenChain
from .header import make_manager
from .prefill import extend_by_chunk

CHUNK_TOKENS = 8192

TOKEN_LIMIT = 1 << 31
"""Tokens of segments are below; those that the trace leaves open are above, each one new."""


class _Request:
    """A request of the trace, live or freed."""

    def __init__(self, number: RequestId, tokens: list[int], chain: TokenChain):
        self.number = number
        self.tokens = tokens
        self.chain = chain
        self.computed = 0
        self.quiet_until = 0  # tokens below which a step asks nothing of the manager


class OperationRunner:
    """Runs the operations of a trace over one manager, and times them."""

    def __init__(self, header: Mapping[str, Any], strategy: str | None = None, policy: str | None = None):
        """Raises `InvalidSetting` for a header that cannot be."""
        self.manager: CacheManager = make_manager(header, strategy, policy)
        self._chunk = header.get("chunk", CHUNK_TOKENS)
        if not isinstance(self._chunk, int) or self._chunk < 1:
            raise InvalidSetting(f"chunk must be a positive whole number of tokens, got {self._chunk!r}", field="chunk")
        self._live: dict[str, _Request] = {}
        self._freed: dict[str, _Request] = {}
        self._retain: dict[RequestId, Retain] = {}
        self._short = ""  # what the pool said when it last refused
        self._count = 0
        self._unique = 0
        self._times_us: dict[str, list[float]] = {}
        self._verbs: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "add": self._add,
            "lookup": self._lookup,
            "step": self._step,
            "fork": self._fork,
            "free": self._free,
            "evict": self._evict,
            "reset": self._reset,
            "mark": self._mark,
            "fill": self._fill,
        }

    def run(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        """Do one operation; what came of it."""
        name, fields = self._read(operation)
        answer: dict[str, Any] = {"op": name}
        if "id" in fields:
            answer["id"] = fields["id"]
        try:
            if name not in self._verbs:
                raise InvalidRequest(f"op must be one of {', '.join(self._verbs)}; got {name!r}", field="op")
            answer |= {"ok": True} | self._verbs[name](fields)
        except IntarsiaError as error:
            answer |= {"ok": False, "error": str(error)}
        pool = self.manager.pool
        answer["blocks_in_use_per_group"] = [group.num_held for group in pool.groups]
        answer["free_blocks"] = pool.num_available_pages
        return answer

    def _read(self, operation: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Both {"op": "add", "id": 1} and {"add": {"id": 1}} are understood."""
        if "op" in operation:
            return operation["op"], operation
        if len(operation) == 1:
            ((name, fields),) = operation.items()
            return name, fields if isinstance(fields, Mapping) else {}
        return None, operation

    # -- the operations ------------------------------------------------------------------------------------------------

    def _add(self, op: Mapping[str, Any]) -> dict[str, Any]:
        key, tokens = self._new_id(op), self._tokens(op)
        if not tokens:
            raise InvalidRequest("a prompt needs at least one token", field="tokens")
        retain = Retain(op.get("priority", 0), op.get("ttl"), bool(op.get("pin", False)))
        request, hit = self._prefill(tokens, op)
        self._live[key] = request
        self._retain[request.number] = retain
        return {"hit_tokens": hit.tokens, "lost_tokens": dict(hit.lost)}

    def _lookup(self, op: Mapping[str, Any]) -> dict[str, Any]:
        tokens = self._tokens(op)
        if not tokens:
            raise InvalidRequest("a prompt needs at least one token", field="tokens")
        hit = self._look(self._chain(tokens, op), op)
        return {"hit_tokens": hit.tokens, "lost_tokens": dict(hit.lost)}

    def _step(self, op: Mapping[str, Any]) -> dict[str, Any]:
        requests = self._chosen(op)
        given = self._tokens(op) if "tokens" in op or "segs" in op else [None] * _whole(op, "n", 1)
        refused: list[str] = []
        for token in given:
            refused += self._round(requests, [self._unique_token() if token is None else token for _ in requests])
            requests = {key: request for key, request in requests.items() if key not in refused}
        return {"refused": refused} | ({"ok": False, "error": self._short} if refused else {})

    def _fork(self, op: Mapping[str, Any]) -> dict[str, Any]:
        parent = self._request(op.get("id"), self._live)
        child = self._new_id({"id": op.get("child")})
        tokens = list(parent.tokens)
        self._count += 1
        request = _Request(RequestId(self._count), tokens, parent.chain.of(tokens))
        self._timed("fork", lambda: self.manager.fork(parent.number, request.number, tokens))
        request.computed = parent.computed
        self._live[child] = request
        return {}

    def _free(self, op: Mapping[str, Any]) -> dict[str, Any]:
        for key, request in self._chosen(op).items():
            self._release(request)
            self._freed[key] = self._live.pop(key)
        return {}

    def _evict(self, op: Mapping[str, Any]) -> dict[str, Any]:
        request = self._request(op.get("id"), self._live | self._freed)
        group, blocks = op.get("group"), op.get("blocks")
        groups = len(self.manager.plan.groups)
        if not isinstance(group, int) or not 0 <= group < groups:
            raise InvalidRequest(f"group must be 0 to {groups - 1}, got {group!r}", field="group")
        if not isinstance(blocks, list) or any(not isinstance(n, int) or n < 0 for n in blocks):
            raise InvalidRequest(f"blocks must be a list of positions from 0 on, got {blocks!r}", field="blocks")
        names = self.manager.names(group, request.chain)
        index = self.manager.pool.groups[group].index
        found = [index[names[n]] for n in blocks if n < len(names) and names[n] in index]
        for block in found:
            self.manager.forget(group, BlockId(block))
        return {"evicted": len(found)}

    def _reset(self, op: Mapping[str, Any]) -> dict[str, Any]:
        self.manager.reset_prefix_cache()
        return {}

    def _mark(self, op: Mapping[str, Any]) -> dict[str, Any]:
        times, self._times_us = self._times_us, {}
        return {"name": op.get("name"), "timings": {kind: _figures(values) for kind, values in times.items()}}

    def _fill(self, op: Mapping[str, Any]) -> dict[str, Any]:
        """Unique requests until one is refused. That one leaves nothing behind."""
        length, steps, most = _whole(op, "len", 1), _whole(op, "steps", 0, least=0), _whole(op, "max", 1 << 30)
        added = 0
        while added < most:
            tokens = [self._unique_token() for _ in range(length)]
            try:
                request, _ = self._prefill(tokens, op)
            except PoolExhausted as error:
                return {"added": added, "error": str(error)}
            key = f"fill-{request.number}"
            self._live[key] = request
            for _ in range(steps):
                if self._round({key: request}, [self._unique_token()]):
                    self._release(self._live.pop(key))
                    return {"added": added, "error": self._short}
            added += 1
        return {"added": added}

    # -- what they do with the manager ---------------------------------------------------------------------------------

    def _prefill(self, tokens: list[int], op: Mapping[str, Any]) -> tuple[_Request, Hit]:
        """Look up, take up, and compute a prompt in chunks, as long ones as there is room for."""
        chunk = op.get("chunk", self._chunk)
        if not isinstance(chunk, int) or chunk < 1:
            raise InvalidRequest(f"chunk must be a positive whole number of tokens, got {chunk!r}", field="chunk")
        chain = self._chain(tokens, op)
        hit = self._look(chain, op)
        self._count += 1
        request = _Request(RequestId(self._count), tokens, chain)
        started = time.perf_counter()
        self.manager.open(request.number, hit)
        request.computed = hit.tokens
        while request.computed < len(tokens):
            try:
                length = min(len(tokens), request.computed + chunk)
                request.computed = extend_by_chunk(self.manager, request.number, length, request.computed)
            except PoolExhausted:
                self.manager.release(request.number, request.computed)
                raise
            self.manager.commit(request.number)
        self._note("prefill", started)
        return request, hit

    def _round(self, requests: Mapping[str, _Request], tokens: Sequence[int]) -> list[str]:
        """One decode step of all these requests: a comparison for each, and work for those that need a block."""
        for request, token in zip(requests.values(), tokens, strict=True):
            request.tokens.append(token)
        refused: list[str] = []
        started = time.perf_counter()
        for key, request in requests.items():
            if request.computed + 1 < request.quiet_until:
                continue
            try:
                self.manager.extend(request.number, request.computed + 1, request.computed)
                request.quiet_until = self.manager.quiet_until(request.number)
            except PoolExhausted as error:
                refused.append(key)
                self._short = str(error)
        self._note("step", started)
        for key, request in requests.items():
            if key in refused:
                request.tokens.pop()
            else:
                request.computed += 1
        return refused

    def _look(self, chain: TokenChain, op: Mapping[str, Any]) -> Hit:
        self._timed("hash", chain.grow)
        return self._timed("lookup", lambda: self.manager.lookup(chain, _salt(op), self._encoder(op)))

    def _chain(self, tokens: list[int], op: Mapping[str, Any]) -> TokenChain:
        return self.manager.chain(tokens, _salt(op), self._encoder(op))

    def _encoder(self, op: Mapping[str, Any]) -> Encoder | None:
        given = op.get("encoder")
        if given is None:
            return None
        if not isinstance(given, Mapping) or "key" not in given:
            raise InvalidRequest(f'encoder must be {{"key": ..., "tokens": ...}}, got {given!r}', field="encoder")
        return Encoder(str(given["key"]).encode(), _whole(given, "tokens", None))

    def _release(self, request: _Request) -> None:
        retain = self._retain.pop(request.number, Retain())
        self._timed("free", lambda: self.manager.release(request.number, request.computed, retain))

    # -- ids and tokens ------------------------------------------------------------------------------------------------

    def _new_id(self, op: Mapping[str, Any]) -> str:
        key = op.get("id")
        if key is None or key == "*" or isinstance(key, (list, dict)):
            raise InvalidRequest(f"a request needs an id of its own, got {key!r}", field="id")
        if str(key) in self._live:
            raise InvalidRequest(f"request {key!r} is live already; free it first", field="id")
        self._freed.pop(str(key), None)
        return str(key)

    def _request(self, key: Any, among: Mapping[str, _Request]) -> _Request:
        if str(key) not in among:
            raise InvalidRequest(f"there is no request {key!r}; {len(self._live)} are live", field="id")
        return among[str(key)]

    def _chosen(self, op: Mapping[str, Any]) -> dict[str, _Request]:
        if op.get("id") == "*":
            return dict(self._live)
        return {str(op.get("id")): self._request(op.get("id"), self._live)}

    def _tokens(self, op: Mapping[str, Any]) -> list[int]:
        if ("tokens" in op) == ("segs" in op):
            raise InvalidRequest('give either "tokens" or "segs"', field="tokens")
        if "segs" in op:
            return [token for segment in op["segs"] for token in _segment(segment)]
        tokens = op["tokens"]
        if not isinstance(tokens, list) or any(
            not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < 2**32 for t in tokens
        ):
            raise InvalidRequest("tokens must be a list of whole numbers from 0 to 2**32 - 1", field="tokens")
        return list(tokens)

    def _unique_token(self) -> int:
        self._unique += 1
        return TOKEN_LIMIT + self._unique % TOKEN_LIMIT

    # -- times ---------------------------------------------------------------------------------------------------------

    def _timed(self, kind: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        self._note(kind, started)
        return result

    def _note(self, kind: str, started: float) -> None:
        self._times_us.setdefault(kind, []).append((time.perf_counter() - started) * 1e6)


def _salt(op: Mapping[str, Any]) -> bytes:
    return str(op.get("salt") or "").encode()


def _segment(segment: Any) -> list[int]:
    """Token j of [seed, length] is a fixed function of seed and j: splitmix64, its upper 31 bits."""
    if not isinstance(segment, list) or len(segment) != 2 or not all(isinstance(n, int) for n in segment):
        raise InvalidRequest(f"a segment is [seed, length], got {segment!r}", field="segs")
    seed, length = segment
    if length < 0:
        raise InvalidRequest(f"a segment's length must not be negative, got {length}", field="segs")
    with np.errstate(over="ignore"):
        z = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64((seed * 0xD1342543DE82EF95) % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z >> np.uint64(33)).tolist()


def _whole(op: Mapping[str, Any], name: str, default: int | None, least: int = 1) -> int:
    value = op.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidRequest(f"{name} must be a whole number of at least {least}, got {value!r}", field=name)
    return value


def _figures(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "median_us": round(statistics.median(ordered), 2),
        "p99_us": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 2),
        "mean_us": round(statistics.fmean(ordered), 2),
    }
