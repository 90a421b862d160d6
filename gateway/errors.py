"""The errors that clients of the gateway get.

Each class has an HTTP status, OpenAI's `type` and `code`, and says whether a retry makes sense. The
same body is the response of a request and the last event of a stream that fails.
"""

from __future__ import annotations

import json
import logging
import math
from http import HTTPStatus
from typing import Any, ClassVar

from llmops.errors import LlmopsError
from llmops.gateway.logging_setup import REQUEST_LINES, current_request

log = logging.getLogger(__name__)

#: Maximum characters of an error's message or parameter, which may repeat a text of the request.
MAX_ERROR_MESSAGE_CHARACTERS = 2000
#: The code of errors for more waiting requests than the limits allow.
OVERLOADED = "overloaded"
# The finish reasons of requests that fail with these codes; all others end with `error`.
_FINISH_REASON_OF_CODE = {
    "cancelled": "cancelled",
    "engine_unavailable": "engine_lost",
    "engine_timeout": "engine_lost",
}


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_ERROR_MESSAGE_CHARACTERS else text[:MAX_ERROR_MESSAGE_CHARACTERS] + "…"


class ApiError(LlmopsError):
    """The base class of all error responses.

    Clients retry 408, 409, 429 and every 5xx unless a header tells them otherwise, so each class
    decides.

    Attributes:
        status: The HTTP status.
        type: OpenAI's `type`.
        code: OpenAI's `code`.
        should_retry: True if the same request may succeed later.
        message: A sentence for the client.
        param: The field of the request that is at fault.
        retry_after: Seconds after which a retry makes sense.
        detail: The error text of an engine, library or address, for the log only; see `log_detail`.
        logged: The request that met the error last, because several can end with one error, and
            whether the log has this request's line.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    should_retry: bool = False
    logged: tuple[str, bool] = ("", False)

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        should_retry: bool | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.detail = detail
        self.retry_after = retry_after
        if code is not None:
            self.code = code
        if should_retry is not None:
            self.should_retry = should_retry

    @property
    def full_message(self) -> str:
        """Return the message with the detail, for the log."""
        return f"{self.message} ({self.detail})" if self.detail else self.message

    @property
    def public_message(self) -> str:
        """Return the message for the client, with the request's id if the log has more."""
        request = current_request.get()
        is_logged = self.logged == (f"request {request}", True)
        return f"{self.message} The gateway's log has request {request}." if is_logged else self.message

    @property
    def finish_reason(self) -> str:
        """Return the finish reason of a request that fails with this error (see `Outcome.finish`)."""
        return _FINISH_REASON_OF_CODE.get(self.code or "", "error")

    @property
    def phrase(self) -> str:
        """Return HTTP's phrase for the status."""
        return HTTPStatus(self.status).phrase

    def body(self) -> dict[str, Any]:
        """Return OpenAI's envelope of the error."""
        message, param = _truncate(self.public_message), _truncate(self.param) if self.param else self.param
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def body_json(self) -> bytes:
        """Return the envelope as JSON."""
        return json.dumps(self.body(), ensure_ascii=False).encode("utf-8", "replace")

    def headers(self) -> dict[str, str]:
        """Return the headers that tell clients whether and when to retry."""
        headers = {"x-should-retry": "true" if self.should_retry else "false"}
        if self.retry_after is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after))
            headers["retry-after-ms"] = str(math.ceil(self.retry_after * 1000))
        return headers


class InvalidRequestError(ApiError):
    """An error, status 400, for a request that is malformed or not allowed; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class UnsupportedError(InvalidRequestError):
    """An error, status 400, for a valid field that the model's engine does not support."""

    code = "unsupported_parameter"


class ContextLengthError(InvalidRequestError):
    """An error, status 400, for a prompt and answer that do not fit into the model's context.

    Attributes:
        tokens: Tokens of the prompt, if they are known.
        most: The most tokens allowed, if they are known.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, *, tokens: int | None = None, most: int | None = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.tokens, self.most = tokens, most


class InvalidKeyError(ApiError):
    """An error, status 401, for a missing or invalid API key.

    The message does not say why a key is invalid.
    """

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"
    challenge = 'Bearer realm="llmops", error="invalid_token"'

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "www-authenticate": self.challenge}


class PrematureTokenError(InvalidKeyError):
    """An error, status 401, for a token that becomes valid later, so the rejection is not cached."""


class MissingKeyError(InvalidKeyError):
    """An error, status 401, for a request without an API key."""

    challenge = 'Bearer realm="llmops"'

    def __init__(self) -> None:
        super().__init__("No API key was sent; send one as `Authorization: Bearer KEY` or as `x-api-key: KEY`.")


class ForbiddenError(ApiError):
    """An error, status 403, for a valid API key that does not permit the request."""

    status = 403
    type = "invalid_request_error"
    code = "insufficient_permissions"


class ModelNotAllowedError(ForbiddenError):
    """An error, status 403, for a model that the API key does not permit, whether it exists or not."""

    code = "model_not_allowed"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"This API key is not for a model '{model}'. GET /v1/models lists what it may use.", param="model"
        )


class ModelNotPricedError(ForbiddenError):
    """An error, status 403, for a model without a price, which the caller's budget cannot pay for."""

    code = "model_not_priced"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model '{model}' has no price, so no budget can pay for it. The gateway's operator can set a price "
            "with `llmops price set`.",
            param="model",
        )


class ContentPolicyError(InvalidRequestError):
    """An error, status 400, for a prompt that a safety filter rejected."""

    code = "content_policy_violation"

    def __init__(self, category: str) -> None:
        """Create the error. Only the `category` is named, never the text."""
        super().__init__(f"The request was refused by a safety filter ({category}); change its text and send it again.")


class SafetyUnavailableError(ApiError):
    """An error, status 503, for an unavailable safety filter whose judgement the policy requires."""

    status = 503
    code = "safety_unavailable"
    should_retry = True

    def __init__(self) -> None:
        super().__init__("A safety filter cannot be reached; send the request again later.", retry_after=1.0)


class NotFoundError(ApiError):
    """An error, status 404, for a route or object that does not exist."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class GoneError(ApiError):
    """An error, status 410, for an object that existed, but is not in this process any longer."""

    status = 410
    type = "invalid_request_error"
    code = "gone"


class ModelNotFoundError(NotFoundError):
    """An error, status 404, for a model that does not exist."""

    code = "model_not_found"

    def __init__(self, model: str, message: str = "") -> None:
        default = f"The model '{model}' does not exist. GET /v1/models lists the models of this gateway."
        super().__init__(message or default, param="model")


class ModelKindError(ModelNotFoundError):
    """An error, status 404, for a model of another kind than the endpoint needs."""

    def __init__(self, model: str) -> None:
        super().__init__(
            model,
            f"The model '{model}' exists, and is of another kind than this endpoint needs: chat and completions need a "
            "model that generates text, embeddings and rerank an encoder. GET /v1/models lists what each can do.",
        )


class MethodNotAllowedError(ApiError):
    """An error, status 405, for a method that the route does not support."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class BodyTooLargeError(ApiError):
    """An error, status 413, for a body larger than allowed."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class HeaderTooLargeError(ApiError):
    """An error, status 431, for a header larger than allowed."""

    status = 431
    type = "invalid_request_error"
    code = "header_too_large"


class RequestTimeoutError(ApiError):
    """An error, status 408, for a request that was not complete in time.

    The connection is closed, because the rest may still arrive.
    """

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"
    should_retry = True

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "connection": "close"}


class RateLimitError(ApiError):
    """An error, status 429, for a reached limit; `retry_after` says when there is room again."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"
    should_retry = True


class TokenRateLimitError(RateLimitError):
    """An error, status 429, for a caller whose tokens per minute are used up."""

    type = "tokens"


class InsufficientQuotaError(RateLimitError):
    """An error, status 429, for a caller whose budget is used up until its next period."""

    type = "insufficient_quota"
    code = "insufficient_quota"
    should_retry = False


class EngineError(ApiError):
    """An error, status 500, for a request on which the engine failed.

    Another replica, or a restarted one, may succeed.
    """

    code = "engine_error"
    should_retry = True

    def __init__(self, detail: str) -> None:
        """Create the error.

        `detail` is the engine's message, which may name files, keys and addresses.
        """
        super().__init__("The engine failed on this request; send it again.", detail=detail)


class ProtocolError(EngineError):
    """An error for messages that break the contract, which count as a failure of the replica."""


class InternalError(ApiError):
    """An error, status 500, for a bug in the gateway, which a retry would meet again.

    The log has the cause under the request's id.
    """

    code = "internal_error"


class UnavailableError(ApiError):
    """An error, status 503, for a Triton or a model that is not available (yet)."""

    status = 503
    type = "service_unavailable"
    code = "engine_unavailable"
    should_retry = True

    def __init__(self, message: str, *, retry_after: float = 2.0, **details: Any) -> None:
        super().__init__(message, retry_after=retry_after, **details)


class OverloadedError(UnavailableError):
    """An error, status 503, for more waiting requests than the limits allow."""

    code = OVERLOADED


class ClientDeadlineError(OverloadedError):
    """An error, status 503, for a request that its tier would have let wait longer than its client."""


class PreemptedError(UnavailableError):
    """An error, status 503, for a request whose engine needs the memory for a higher tier."""


class DrainingError(UnavailableError):
    """An error, status 503, for an engine that is shutting down and accepts no new requests."""


class EngineTimeoutError(ApiError):
    """An error, status 504, for an engine that accepted the request and sent nothing for too long.

    A retry would double its load.
    """

    status = 504
    type = "timeout_error"
    code = "engine_timeout"


TRITON_UNREACHABLE = "Triton cannot be reached. Try again later."
TRITON_NOT_RESPONDING = "Triton does not answer. Try again later."


class CancelledStreamError(ApiError):
    """An error, status 499, for a cancelled request. Nearly always its client has disconnected."""

    status = 499
    type = "cancelled"
    code = "cancelled"

    def __init__(self) -> None:
        super().__init__("The request was cancelled.")


def missing_parameter(where: str) -> InvalidRequestError:
    """Return the error for a required field `where` that is absent."""
    text = f"Missing required parameter: '{where}'. Add it to the request."
    return InvalidRequestError(text, param=where, code="missing_required_parameter")


def log_detail(error: ApiError, where: str | None = None) -> None:
    """Log the detail of an error, once per request, and one line of a kind of error per second.

    Outside of a request, `where` takes its place.
    """
    place = where or f"request {current_request.get()}"
    if error.detail and error.logged[0] != place:
        suffix = REQUEST_LINES.suffix((type(error), error.code))
        error.logged = place, suffix is not None
        if suffix is not None:
            log.error("%s: %s%s", place, error.full_message, suffix)
