"""Settings that name a place outside: the folder of a tokenizer, and where traces and cache events go."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...errors import InvalidSetting

if TYPE_CHECKING:
    from ...controller.kv_publisher import KvEventsSettings


def folder_of_tokenizer(given: str | None, name: str) -> str | None:
    """Raises `ModelNotFound` for a name on the Hub whose files are not here and cannot be fetched."""
    if given is None:
        return None
    from ..checkpoints.model_dir import find_model

    return str(find_model(given, with_weights=False).path)


def traces_endpoint(url: str | None, name: str) -> str | None:
    """Where traces go, if they can be sent from here."""
    if url is None:
        return None
    if urlsplit(url).scheme not in ("http", "https"):
        raise InvalidSetting(
            f"{name} must be a URL that takes OTLP over HTTP (http://HOST:4318/v1/traces), got {url!r}", field=name
        )
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        raise InvalidSetting(f"{name} needs OpenTelemetry's exporter: pip install 'intarsia[otel]'", field=name)
    return url


def kv_events(given: str | Mapping[str, Any] | None, name: str) -> "KvEventsSettings | None":
    """Raises `InvalidSetting` for what is no JSON, or cannot be."""
    if given is None:
        return None
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise InvalidSetting(f"{name} must be a JSON object, and is no JSON: {error}", field=name) from None
    if not isinstance(found, Mapping):
        raise InvalidSetting(f"{name} must be a JSON object, got {str(given)[:80]}", field=name)
    from ...controller.kv_publisher import kv_events_settings

    return kv_events_settings(found)
