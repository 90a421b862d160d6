"""What the store refuses, or cannot, as the one who asked is told it."""

from __future__ import annotations

from llmops.errors import DuplicateNameError, InputError, LlmopsError, UnknownResourceError
from llmops.gateway.errors import ApiError, InvalidRequestError, NotFoundError


class ConflictError(ApiError):
    """409: what was to be made is there already."""

    status = 409
    type = "invalid_request_error"
    code = "already_exists"


def as_api_error(error: LlmopsError) -> LlmopsError:
    """Of a sentence that is for the one who asked, its answer; others stay what they are."""
    kinds = ((ApiError, None), (UnknownResourceError, NotFoundError), (DuplicateNameError, ConflictError))
    for kind, answer in (*kinds, (InputError, InvalidRequestError)):
        if isinstance(error, kind):
            return answer(error.message) if answer else error
    return error
