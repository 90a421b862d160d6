"""The gateway's branch of the error tree: each error knows its HTTP status, OpenAI `type`, `code` and `param`,
and whether trying again makes sense.

`body()` is OpenAI's envelope, `headers()` what its clients read (`x-should-retry`, `retry-after`, `retry-after-ms`).
The same body is the data object of a stream that fails midway.
"""

from __future__ import annotations

import json
import logging
import math
from http import HTTPStatus
from typing import Any, ClassVar

from llmops.errors import LlmopsError
from llmops.gateway.logging_setup import current_request

log = logging.getLogger(__name__)

MAX_ERROR_MESSAGE_CHARACTERS = 2000
#: The code of errors that more requests wait than the limits allow.
OVERLOADED = "overloaded"
_FINISH_REASONS = {"cancelled": "cancelled", "engine_unavailable": "engine_lost", "engine_timeout": "engine_lost"}


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_ERROR_MESSAGE_CHARACTERS else text[:MAX_ERROR_MESSAGE_CHARACTERS] + "…"


class ApiError(LlmopsError):
    """Base of all answers that are not a success. `retry_after` is in seconds.

    `message` is for the client. `detail`, what an engine, library or address said, is for the log alone (`log_detail`).
    Clients retry 408, 409, 429 and every 5xx unless `should_retry` tells them better, so each class says it.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    should_retry: bool = False
    # where the detail was logged last; several requests can end with one error
    logged: str | None = None

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
    def told(self) -> str:
        """The message with what only the log may have."""
        return f"{self.message} ({self.detail})" if self.detail else self.message

    @property
    def public(self) -> str:
        """The message, and where the rest is."""
        request = current_request.get()
        return f"{self.message} The gateway's log has request {request}." if self.detail and request else self.message

    @property
    def finish(self) -> str:
        """How a request that fails with this ended, as an Outcome calls it."""
        return _FINISH_REASONS.get(self.code or "", "error")

    @property
    def phrase(self) -> str:
        """What HTTP calls the status."""
        return HTTPStatus(self.status).phrase

    def body(self) -> dict[str, Any]:
        # a client's own texts are in some messages; it needs no megabytes of them back
        message, param = _truncate(self.public), _truncate(self.param) if self.param else self.param
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def body_json(self) -> bytes:
        return json.dumps(self.body(), ensure_ascii=False).encode("utf-8", "replace")

    def headers(self) -> dict[str, str]:
        headers = {"x-should-retry": "true" if self.should_retry else "false"}
        if self.retry_after is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after))
            headers["retry-after-ms"] = str(math.ceil(self.retry_after * 1000))
        return headers


class InvalidRequestError(ApiError):
    """400: the request cannot be understood or is not allowed; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class UnsupportedError(InvalidRequestError):
    """400: the field is fine, but this model's engine target cannot do it."""

    code = "unsupported_parameter"


class ContextLengthError(InvalidRequestError):
    """400: prompt and answer do not fit into the model's context. `tokens` of the prompt and the `most` that there may
    be, where they are known."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, tokens: int | None = None, most: int | None = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.tokens, self.most = tokens, most


class InvalidKeyError(ApiError):
    """401: no key, or one that is not taken. The message says no more than its sender may know."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"
    challenge = 'Bearer realm="llmops", error="invalid_token"'

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "www-authenticate": self.challenge}


class MissingKeyError(InvalidKeyError):
    """401: nothing was sent that could be a key."""

    challenge = 'Bearer realm="llmops"'

    def __init__(self) -> None:
        super().__init__("No API key was sent; send one as `Authorization: Bearer KEY` or as `x-api-key: KEY`.")


class ForbiddenError(ApiError):
    """403: the key is right, and is not for this."""

    status = 403
    type = "invalid_request_error"
    code = "insufficient_permissions"


class ModelNotAllowedError(ForbiddenError):
    """403: a model that the key does not name, whether there is one or not."""

    code = "model_not_allowed"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"This API key is not for a model '{model}'. GET /v1/models lists what it may use.", param="model"
        )


class ModelNotPricedError(ForbiddenError):
    """403: a budget cannot pay for what has no price, and would bound nothing."""

    code = "model_not_priced"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model '{model}' has no price, so that no budget can pay for it; whoever runs this gateway gives it "
            "one with `llmops price set`.",
            param="model",
        )


class ContentPolicyError(InvalidRequestError):
    """400: a safety filter found something in the prompt."""

    code = "content_policy_violation"

    def __init__(self, category: str) -> None:
        """Name the `category` that was found, and nothing of the text."""
        super().__init__(f"The request was refused by a safety filter ({category}); change its text and send it again.")


class SafetyUnavailableError(ApiError):
    """503: a safety filter could not judge, and the policy lets nothing pass that was not judged."""

    status = 503
    code = "safety_unavailable"
    should_retry = True

    def __init__(self) -> None:
        super().__init__("A safety filter cannot be reached; send the request again later.", retry_after=1.0)


class NotFoundError(ApiError):
    """404: no such route or object."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class GoneError(ApiError):
    """410: the object existed, and this process does not have it any longer."""

    status = 410
    type = "invalid_request_error"
    code = "gone"


class ModelNotFoundError(NotFoundError):
    """404: no such model."""

    code = "model_not_found"

    def __init__(self, model: str, message: str = "") -> None:
        said = f"The model '{model}' does not exist. GET /v1/models lists the models of this gateway."
        super().__init__(message or said, param="model")


class ModelKindError(ModelNotFoundError):
    """404: the model exists, and cannot do what this endpoint does."""

    def __init__(self, model: str) -> None:
        super().__init__(
            model,
            f"The model '{model}' exists, and is of another kind than this endpoint needs: chat and completions need a "
            "model that generates text, embeddings and rerank an encoder. GET /v1/models lists what each can do.",
        )


class MethodNotAllowedError(ApiError):
    """405: the route exists, the method does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class BodyTooLargeError(ApiError):
    """413: the body is over the limit."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class HeaderTooLargeError(ApiError):
    """431: the header is over the limit."""

    status = 431
    type = "invalid_request_error"
    code = "header_too_large"


class RequestTimeoutError(ApiError):
    """408: the request did not come whole in time. The connection is closed, as the rest may still come."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"
    should_retry = True

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "connection": "close"}


class RateLimitError(ApiError):
    """429: the caller has used what it may for now; `retry_after` says when there is more."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"
    should_retry = True

    def again(self, left: float) -> RateLimitError:
        """The same refusal to one who came back `left` seconds too soon."""
        return type(self)(self.message, retry_after=left, should_retry=self.should_retry)


class TokenRateLimitError(RateLimitError):
    """429: tokens per minute are used up."""

    type = "tokens"


class InsufficientQuotaError(RateLimitError):
    """429: the caller's budget is used up; coming back does not help before the next period."""

    type = "insufficient_quota"
    code = "insufficient_quota"
    should_retry = False

    def again(self, left: float) -> InsufficientQuotaError:
        return type(self)(self.message)


class EngineError(ApiError):
    """500: the engine failed on this request; another replica, or the same one started again, may not."""

    code = "engine_error"
    should_retry = True

    def __init__(self, detail: str) -> None:
        """`detail` is what the engine said: it may name files, keys and addresses."""
        super().__init__("The engine failed on this request.", detail=detail)


class InternalError(ApiError):
    """500: a bug of ours, which trying again would only meet again; the log has it under the request id."""

    code = "internal_error"


class UnavailableError(ApiError):
    """503: Triton or the model is not there (yet)."""

    status = 503
    type = "service_unavailable"
    code = "engine_unavailable"
    should_retry = True

    def __init__(self, message: str, *, retry_after: float = 2.0, **details: Any) -> None:
        super().__init__(message, retry_after=retry_after, **details)


class OverloadedError(UnavailableError):
    """503: more requests wait than the limits allow."""

    code = OVERLOADED


class PreemptedError(UnavailableError):
    """503: the engine's memory is needed for requests that go first."""


class DrainingError(UnavailableError):
    """503: the engine finishes what it has, or did, and takes nothing new."""


class EngineTimeoutError(ApiError):
    """504: the engine accepted the request and then sent nothing for too long. A retry would double its load."""

    status = 504
    type = "timeout_error"
    code = "engine_timeout"


TRITON_UNREACHABLE = "Triton cannot be reached. Try again later."
TRITON_NOT_RESPONDING = "Triton does not answer. Try again later."


class CancelledStreamError(ApiError):
    """499: the request was cancelled, nearly always because the client went away; nobody reads this answer."""

    status = 499
    type = "cancelled"
    code = "cancelled"

    def __init__(self) -> None:
        super().__init__("The request was cancelled.")


def missing_parameter(where: str) -> InvalidRequestError:
    """The field that a request needs and does not have."""
    text = f"Missing required parameter: '{where}'. Add it to the request."
    return InvalidRequestError(text, param=where, code="missing_required_parameter")


def log_detail(error: ApiError, where: str | None = None) -> None:
    """What clients are not told goes to the log, once per request (or `where`, outside of any)."""
    place = where or f"request {current_request.get()}"
    if error.detail and error.logged != place:
        error.logged = place
        log.error("%s: %s", place, error.told)
