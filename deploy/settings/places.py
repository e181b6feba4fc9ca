"""Settings that name a place outside: the folder of a tokenizer, and where traces go."""

from importlib.util import find_spec
from urllib.parse import urlsplit

from ...errors import InvalidSetting


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
