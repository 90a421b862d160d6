"""Connections that fail, as sentences: what httpx and gRPC say is for their programmers."""

from __future__ import annotations

import re
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

from llmops.errors import InputError, LlmopsError, ServerError

#: What to do about a gateway that is not there.
START_GATEWAY_ADVICE = "start one with `llmops up` or `llmops gateway`, or name another with --url"


def check_url(url: str, name: str = "--url") -> None:
    """Check that `url` is one of HTTP.

    Args:
        url: What was given.
        name: The option that it was given with.

    Raises:
        InputError: The URL has no scheme, another one, or no host. The message has the URL that was meant.
    """
    parts = urlsplit(url)
    if parts.scheme in ("http", "https") and parts.hostname:
        return
    if "://" not in url and url.strip("/"):
        raise InputError(f"{name} {url} has no scheme; write http://{url.lstrip('/')}.")
    raise InputError(f"{name} {url} is not a URL of HTTP; write http://HOST:PORT/v1.")


def http_connection_error(url: str, error: Exception, advice: str = START_GATEWAY_ADVICE) -> LlmopsError:
    """Return the error for a request to `url` that got no answer.

    Args:
        url: The address that was asked.
        error: What httpx raised.
        advice: A clause that says what to do when nothing listens at `url`.
    """
    import httpx

    causes = _causes(error)
    if any(isinstance(one, socket.gaierror) or "Name or service not known" in str(one) for one in causes):
        return ServerError(f"The host of {url} is not known to DNS; check its name.")
    if any(isinstance(one, ssl.SSLError) or "CERTIFICATE_VERIFY_FAILED" in str(one) for one in causes):
        if any("CERTIFICATE" in str(one).upper() for one in causes):
            return ServerError(
                f"The TLS certificate of {url} is not trusted here; name its authority in SSL_CERT_FILE."
            )
        return ServerError(f"{url} does not speak TLS; write http:// in place of https://.")
    if isinstance(error, (httpx.UnsupportedProtocol, httpx.InvalidURL)):
        return InputError(f"{url} is not a URL of HTTP; write http://HOST:PORT/v1.")
    if isinstance(error, httpx.ConnectTimeout):
        return ServerError(f"{url} cannot be reached: no connection in time; check the host, the port and firewalls.")
    if isinstance(error, httpx.ConnectError):
        return ServerError(f"Nothing answers at {url}; {advice}.")
    if isinstance(error, httpx.TimeoutException):
        return ServerError(f"{url} did not answer in time; it is overloaded or hangs: see its log.")
    if isinstance(error, httpx.RemoteProtocolError) and "peer closed" not in str(error):
        return ServerError(
            f"{url} does not speak HTTP/1.1: is that Triton's gRPC port (8001)? A gateway listens at 9000 by default."
        )
    return ServerError(f"The connection to {url} broke before the answer was complete; see the server's log.")


def http_status_error(url: str, status: int, message: str, scope: str = "inference") -> ServerError:
    """Return the error for an answer of `url` that is not a success.

    Args:
        url: The address that was asked.
        status: The HTTP status.
        message: What the server says.
        scope: The scope of a key that may do this.
    """
    said = f" ({message.rstrip('.')})" if message else ""
    if status == 401:
        return ServerError(f"{url} asks for an API key{said}; set LLMOPS_API_KEY.")
    if status == 403:
        return ServerError(f"The API key may not do this at {url}{said}; it needs the scope {scope}.")
    if status == 404 and re.match(r"The model .* does not exist", message):
        return ServerError(f"{url} does not serve that model{said}; choose another with --model.")
    if status == 404:
        base = url.rstrip("/")
        hint = "" if base.endswith("/v1") else f" Did you mean {base}/v1?"
        return ServerError(f"{url} has no such route{said}; check the URL.{hint}")
    if status == 429:
        return ServerError(f"{url} has reached a limit of this key{said}; try again later.")
    if status in (502, 503, 504):
        return ServerError(f"{url} cannot serve now ({status}{said}); try again, and see its log.")
    return ServerError(f"{url} answers {status}{said}; see its log.")


def grpc_call_error(address: str, error: Any) -> ServerError:
    """Return the error for a gRPC call to Triton that failed.

    Args:
        address: HOST:PORT that was called.
        error: The `grpc.RpcError`.
    """
    code = error.code().name if callable(getattr(error, "code", None)) else ""
    details = str(error.details() if callable(getattr(error, "details", None)) else error) or ""
    lowered = details.lower()
    if "errors resolving" in lowered or "dns resolution failed" in lowered:
        return ServerError(f"The host of {address} is not known to DNS; check its name.")
    if "parsing http/2" in lowered or "http1" in lowered:
        return ServerError(f"{address} answers in HTTP and not in gRPC; Triton's gRPC port is 8001 by default.")
    if code == "UNIMPLEMENTED":
        return ServerError(f"{address} answers in gRPC and is not Triton; name Triton's gRPC port, 8001 by default.")
    if code == "DEADLINE_EXCEEDED":
        return ServerError(f"Triton at {address} did not answer in time; see the log of `llmops serve`.")
    if code == "UNAVAILABLE":
        return ServerError(
            f"No Triton answers at {address}; start one with `llmops serve`, and name its gRPC port, 8001 by default."
        )
    return ServerError(f"Triton at {address} refused ({details.rstrip('.') or code}); see the log of `llmops serve`.")


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
