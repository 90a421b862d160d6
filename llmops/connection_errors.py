"""Errors with advice for users about failed connections of httpx and gRPC."""

import re
import socket
import ssl
from typing import Any

from llmops.errors import InputError, LlmopsError, ServerError
from llmops.urls import http_url_problem, without_secrets

#: Advice if no gateway listens at the URL of a command.
START_GATEWAY_ADVICE = "start one with `llmops up` or `llmops gateway`, or name another with --url"


def check_url(url: str, name: str = "--url") -> None:
    """Check that an option's value is an HTTP URL.

    Args:
        url: The value of the option.
        name: The option as the user writes it, for the message.

    Raises:
        InputError: The URL has no scheme, a scheme other than http and https, no host, or a host or
            port that cannot exist. The message suggests a URL.
    """
    problem, has_scheme, url = http_url_problem(url), "://" in url, without_secrets(url)
    if problem and not has_scheme and url.strip("/"):
        raise InputError(f"{name} {url} has no scheme; write http://{url.lstrip('/')}.")
    if problem:
        raise InputError(f"{name} {url} is not an HTTP URL ({problem}); write http://HOST:PORT/v1.")


def http_connection_error(url: str, error: Exception, advice: str = START_GATEWAY_ADVICE) -> LlmopsError:
    """Return the error for a request that got no response.

    Args:
        url: The URL of the request.
        error: The exception of httpx.
        advice: A clause that says what to do if no server listens at `url`.
    """
    import httpx

    from llmops.response_limits import UnboundedResponseError

    url = without_secrets(url)
    if isinstance(error, UnboundedResponseError):
        return ServerError(f"{url} {error}; check that the URL names the server that you mean.")
    causes = _causes(error)
    if any(isinstance(cause, socket.gaierror) or "Name or service not known" in str(cause) for cause in causes):
        return ServerError(f"The host of {url} is not known to DNS; check its name.")
    if any(isinstance(cause, ssl.SSLError) or "CERTIFICATE_VERIFY_FAILED" in str(cause) for cause in causes):
        if any("CERTIFICATE" in str(cause).upper() for cause in causes):
            return ServerError(
                f"The TLS certificate of {url} is not trusted; set SSL_CERT_FILE to the certificate of its authority."
            )
        return ServerError(f"{url} does not speak TLS; write http:// in place of https://.")
    if isinstance(error, (httpx.UnsupportedProtocol, httpx.InvalidURL)):
        return InputError(f"{url} is not an HTTP URL; write http://HOST:PORT/v1.")
    if isinstance(error, httpx.ConnectTimeout):
        return ServerError(f"{url} cannot be reached: no connection in time; check the host, the port and firewalls.")
    if isinstance(error, httpx.ConnectError):
        return ServerError(f"Nothing answers at {url}; {advice}.")
    if isinstance(error, httpx.TimeoutException):
        return ServerError(f"{url} did not answer in time: the server is overloaded or hangs. See the server's log.")
    if isinstance(error, httpx.RemoteProtocolError) and "peer closed" not in str(error):
        return ServerError(
            f"{url} does not speak HTTP/1.1. If the port is Triton's gRPC port (8001), use the gateway's port, "
            "9000 by default."
        )
    return ServerError(f"The connection to {url} broke before the answer was complete; see the server's log.")


def http_status_error(url: str, status: int, message: str) -> ServerError:
    """Return the error for a response whose status is not a success.

    Args:
        url: The URL of the request.
        status: The HTTP status.
        message: The error message in the response, or an empty text.
    """
    url, reason = without_secrets(url), f" ({message.rstrip('.')})" if message else ""
    if status == 401:
        return ServerError(f"{url} asks for an API key{reason}; set LLMOPS_API_KEY.")
    if status == 403:
        return ServerError(f"The API key may not send requests to {url}{reason}; use a key with the scope inference.")
    if status == 404 and re.match(r"The model .* does not exist", message):
        return ServerError(f"{url} does not serve that model{reason}; choose another with --model.")
    if status == 404:
        base = url.rstrip("/")
        hint = "" if base.endswith("/v1") else f" Did you mean {base}/v1?"
        return ServerError(f"{url} does not exist on the server{reason}; check the URL.{hint}")
    if status == 429:
        return ServerError(f"{url} has reached a limit of this key{reason}; try again later.")
    if status in (502, 503, 504):
        return ServerError(f"{url} cannot serve now ({status}{reason}); try again, and see the server's log.")
    return ServerError(f"{url} answers {status}{reason}; see the server's log.")


def grpc_call_error(address: str, error: Any) -> ServerError:
    """Return the error for a gRPC call to Triton that failed.

    Args:
        address: HOST:PORT of the server.
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
    """Return the exception and all exceptions that led to it."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
