"""HTTP requests that are wrong in every way, made at random from right ones, for every route there is."""

import json
import random
import string
from collections.abc import Mapping
from typing import Any, NamedTuple

from intarsia.deploy.front_end.access import ROUTES, Level

from .fuzz import GOOD_BODIES, NASTY_BYTES, NASTY_HTTP, garbled, mutated

BODIES: dict[str, dict[str, Any]] = GOOD_BODIES | {
    "/v1/chat/completions": GOOD_BODIES["/v1/chat/completions"]
    | {"chat_template_kwargs": {"enable_thinking": False}, "tool_choice": "auto", "logprobs": True, "top_logprobs": 2},
    "/v1/completions": GOOD_BODIES["/v1/completions"]
    | {"structured_outputs": {"choice": ["yes", "no"]}, "stop_token_ids": [5], "prompt_logprobs": 1, "priority": 1},
    "/v1/conversations/{conversation_id}": {"metadata": {"for": "you"}},
    "/v1/conversations/{conversation_id}/items": {"items": [{"type": "message", "role": "user", "content": "Hello"}]},
}
"""What is posted where, right."""

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "FOO", "P\tO")

CONTENT_TYPES = (
    "text/plain", "application/xml", "", "application/json; charset=utf-16", "multipart/form-data; boundary=x",
    "application/x-www-form-urlencoded", "application/json;" * 50, "\xff",
)  # fmt: skip

ODD_HEADERS = (
    "X-Request-Id: {noise}", "X-Request-Id: fixed", "traceparent: {noise}", "traceparent: 00-{hex}-{half}-01",
    "X-Api-Key: {noise}", "anthropic-version: {noise}", "anthropic-version: 2023-06-01", "anthropic-beta: {noise}",
    "Accept: {noise}", "Cookie: {noise}", "X-Forwarded-For: {noise}", "X-Forwarded-Prefix: /llm", "Range: bytes=0-1",
    "Accept-Encoding: gzip;q=9", "If-None-Match: *", "TE: trailers", "User-Agent: {noise}",
)  # fmt: skip

ODD_QUERIES = (
    "?stream=true", "?stream=true&starting_after=3", "?starting_after=-1", "?stream=maybe", "?limit=5&order=asc",
    "?limit=0", "?limit=99999999999999999999", "?after=msg_1", "?order=up", "?include[]=x", "?after=%00%ff",
)  # fmt: skip

WRONG_HEADERS = (
    "Content-Encoding: gzip", "Content-Encoding: br", "Expect: 100-continue", "Upgrade: h2c", "Upgrade: websocket",
    "Host: {noise}", "Connection: upgrade", "{noise}: 1", ": x", "no colon", " folded: x", "Cookie: {long}",
    "User-Agent: {long}",
)  # fmt: skip
"""What may change how a request is read."""

AT_ONCE_BYTES = 16_384
"""That a server takes in one piece."""


class Case(NamedTuple):
    """One request, as bytes."""

    pieces: list[bytes]  # sent one after another
    is_http: bool  # false: the head itself is wrong, and the answer may be words, or none
    is_whole: bool  # false: it ends too early
    is_head: bool  # asked with HEAD, whose answer has no body
    may_enter: bool | None  # false: without a key that opens it; None: cannot be told
    read_bytes: int | None  # the client leaves when it has read so much; None: it stays
    is_at_once: bool  # it is short and sent as one, so that no answer can be lost to bytes that still come
    about: str


def http_case(
    rng: random.Random, keys: Mapping[str, str], admin_key: str, beginnings: tuple[str, ...] = ("/",)
) -> Case:
    """keys: by tenant. beginnings: of the routes that are asked"""
    if rng.random() < 0.03:
        return _raw(rng)
    routes, posted = ([each for each in all_of if each.startswith(beginnings)] for all_of in (ROUTES, BODIES))
    route = rng.choice(routes) if rng.random() < 0.35 or not posted else rng.choice(posted)
    path, is_plain = _path(rng, route)
    method = rng.choice(METHODS) if rng.random() < 0.08 else _method(rng, route)
    authorization, opens = _authorization(rng, keys, admin_key, ROUTES[route])
    body = _body(rng, route)
    framing, content, is_framed, is_whole = _framed(rng, body)
    more = [_header(rng, ODD_HEADERS) for _ in range(rng.choice((0, 0, 0, 1, 3)))]
    wrong = [_header(rng, WRONG_HEADERS)] if rng.random() < 0.1 else []
    kind = "application/json" if rng.random() < 0.85 else rng.choice(CONTENT_TYPES)
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Type: {kind}"]
    lines += [_with_key(rng, each) for each in authorization] + framing + more + wrong
    head = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")
    leaves = rng.random() < 0.1
    pieces = _pieces(rng, head + content)
    return Case(
        pieces=pieces,
        is_http=is_framed
        and path.isascii()
        and not wrong
        and method in METHODS[:9]
        and kind in ("application/json", ""),
        is_whole=is_whole,
        is_head=method == "HEAD",
        may_enter=opens if is_plain and not wrong else None,
        read_bytes=rng.choice((0, 1, 200)) if leaves else None,
        is_at_once=len(pieces) == 1 and len(pieces[0]) <= AT_ONCE_BYTES,
        about=f"{method} {path[:80]} {authorization} {framing} {more} {wrong} {content[:200]!r}",
    )


def _method(rng: random.Random, route: str) -> str:
    if route in ("/v1/responses/{response_id}", "/v1/conversations/{conversation_id}/items/{item_id}"):
        return rng.choice(("GET", "DELETE"))
    if route == "/v1/conversations/{conversation_id}":
        return rng.choice(("GET", "POST", "DELETE"))
    return "POST" if route in BODIES or route.endswith("/cancel") else "GET"


def _raw(rng: random.Random) -> Case:
    payload = garbled(rng, rng.choice(NASTY_HTTP)) if rng.random() < 0.5 else rng.choice(NASTY_HTTP)
    return Case([payload], False, False, False, None, None, False, f"{payload[:100]!r}")


def _path(rng: random.Random, route: str) -> tuple[str, bool]:
    """A path, and whether it is the route's own."""
    names = ("demo", "nobody", "a/b/c", "%00", "%2e%2e%2f", "é", "x" * 3000, "")
    path = route.replace("{model:path}", rng.choice(names))
    for part in ("{response_id}", "{conversation_id}", "{item_id}"):
        path = path.replace(part, _id(rng))
    if path != route and rng.random() < 0.4:
        path += rng.choice(ODD_QUERIES)
    if rng.random() > 0.12:
        return path, True
    odd = (
        path + "/", "/" + path, path.replace("/", "//"), path + "?" + _noise(rng), path.upper(), path + "%00",
        path + "/../health", "/%2e%2e" + path, path.replace("o", "%6f", 1), "http://x" + path, path + "#x",
        path + "?" + "a=b&" * 2000, "*", path[:-1], "/" + _noise(rng),
    )  # fmt: skip
    return rng.choice(odd), False


def _id(rng: random.Random) -> str:
    """One that other requests may have made, or none."""
    return rng.choice(("resp_fixed", "resp_fixed", "resp_0", "..", "%00", "é", "resp_" + "x" * 3000, "a%2Fb", "'--"))


def _authorization(
    rng: random.Random, keys: Mapping[str, str], admin_key: str, level: Level
) -> tuple[list[str], bool | None]:
    """The headers, and whether they open a door of that level."""
    if rng.random() < 0.75:
        key = admin_key if level is Level.ADMIN else rng.choice(list(keys.values()))
        return [f"Bearer {key}"], True
    good = rng.choice(list(keys.values()))
    ways: list[tuple[list[str], bool | None]] = [
        ([], False), ([""], False), (["Bearer"], False), (["Bearer "], False), ([f"Basic {good}"], False),
        ([good], False), ([f"Bearer {good[:-1]}"], False), ([f"Bearer {good} x"], False), (["Bearer \xff\xfe"], False),
        ([f"bearer   {good}"], None), ([f"Bearer {good}", "Bearer x"], None), (["Bearer " + "x" * 5000], False),
        ([f"Bearer {admin_key}"], level in (Level.ADMIN, Level.FIGURES)),
        ([f"Bearer {good}"], level in (Level.KEY, Level.FIGURES)),
    ]  # fmt: skip
    headers, opens = rng.choice(ways)
    return headers, True if level is Level.OPEN else opens


def _with_key(rng: random.Random, authorization: str) -> str:
    """The header; a key may come in Anthropic's, too."""
    key = authorization.removeprefix("Bearer ")
    is_key = key != authorization and key.replace("-", "").isalnum()
    return f"X-Api-Key: {key}" if is_key and rng.random() < 0.2 else f"Authorization: {authorization}"


def _body(rng: random.Random, route: str) -> bytes:
    chance = rng.random()
    if route not in BODIES:
        return b"" if chance < 0.8 else rng.choice(NASTY_BYTES)
    if chance < 0.05:
        return rng.choice(NASTY_BYTES)
    good = BODIES[route if chance < 0.9 else rng.choice(list(BODIES))]
    subset = {name: value for name, value in good.items() if rng.random() < 0.6}
    subset |= {name: good[name] for name in ("prompt", "messages", "input", "tokens", "max_tokens") if name in good}
    text = json.dumps(subset if chance < 0.1 else mutated(rng, subset), ensure_ascii=rng.random() < 0.5)
    body = text.encode("utf-8", "surrogatepass")
    return garbled(rng, body) if rng.random() < 0.1 else body


def _framed(rng: random.Random, body: bytes) -> tuple[list[str], bytes, bool, bool]:
    """Headers that say how long it is, the bytes, whether that is HTTP, and whether it is whole."""
    if rng.random() < 0.8:
        return [f"Content-Length: {len(body)}"], body, True, True
    chunked = ["Transfer-Encoding: chunked"]
    match rng.randrange(9):
        case 0:
            return [f"Content-Length: {len(body) + rng.randint(1, 10**6)}"], body, True, False
        case 1:
            short = rng.randrange(len(body) + 1)
            return [f"Content-Length: {short}"], body, False, True
        case 2:
            odd = rng.choice(("-1", "x", "1e3", "0x10", "9" * 40, "+5", "1, 2", ""))
            return [f"Content-Length: {odd}"], body, False, False
        case 3:
            return [f"Content-Length: {len(body)}", "Content-Length: 3"], body, False, False
        case 4:
            return [*chunked, f"Content-Length: {len(body)}"], _chunks(rng, body), False, False
        case 5:
            return ["Transfer-Encoding: gzip, chunked, x"], _chunks(rng, body), False, False
        case 6:
            return chunked, garbled(rng, _chunks(rng, body)), False, False
        case 7:
            return chunked, _chunks(rng, body)[: -rng.randint(1, 6)], True, False
        case _:
            return chunked, _chunks(rng, body), True, True


def _chunks(rng: random.Random, body: bytes) -> bytes:
    size = rng.choice((1, 7, 1000)) if len(body) < 5000 else 5000
    out = bytearray()
    for start in range(0, len(body), size):
        piece = body[start : start + size]
        extension = b";x=y" if rng.random() < 0.1 else b""
        out += b"%x" % len(piece) + extension + b"\r\n" + piece + b"\r\n"
    return bytes(out + b"0\r\n\r\n")


def _pieces(rng: random.Random, data: bytes) -> list[bytes]:
    """Cut at random, or not."""
    if rng.random() < 0.8:
        return [data]
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(3))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def _header(rng: random.Random, kinds: tuple[str, ...]) -> str:
    made = rng.choice(kinds)
    values = {
        "noise": _noise(rng),
        "long": "x" * rng.choice((100, 9000, 70_000)),
        "hex": rng.randbytes(16).hex(),
        "half": rng.randbytes(8).hex(),
    }
    for name, value in values.items():
        made = made.replace("{" + name + "}", value)
    return made


def _noise(rng: random.Random) -> str:
    letters = string.ascii_letters + string.digits + "-_.~!*'()%=&\"<>[]{}|^`" + "".join(map(chr, range(0xA0, 0x100)))
    return "".join(rng.choices(letters, k=rng.choice((0, 1, 8, 60, 300))))
