"""Titles that a model writes for conversations after their first answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from llmops.background import TaskSet
from llmops.gateway.conversations.conversation_store import ConversationStore
from llmops.gateway.errors import ApiError
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.chat_generation import answer_message
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller, Outcome
from llmops.gateway.logging_setup import request_logger

log = request_logger(__name__)

#: Maximum length of a title in tokens: enough for six words.
MAX_TITLE_TOKENS = 24
#: Maximum length of the question and of the answer that the model reads for a title, in characters.
MAX_READ_CHARACTERS = 1000
_INSTRUCTION = (
    "Write a title of at most six words for this conversation, in its language. Answer with the title alone.\n\n"
    "User: {question}\n\nAssistant: {answer}"
)


class TitleWriter:
    """A background writer of titles. The titles are billed to the owner of the conversation."""

    def __init__(self, service: AppState, model: str, checks: Sequence[Check]) -> None:
        """Create the writer. The checks bill its requests, but do not reject them."""
        self._service, self._model, self._checks = service, model, checks
        self._tasks = TaskSet()

    def schedule(
        self, store: ConversationStore, caller: Caller, conversation_id: str, question: str, text: str
    ) -> None:
        """Write a title in the background. A title that changes in the meantime is kept.

        `question` is the first question of the conversation, and `text` the answer to it.
        """
        work = self._retitle(store, caller, conversation_id, question, text)
        self._tasks.start(work, "title")

    async def close(self) -> None:
        """Cancel the titles that are not written yet."""
        await self._tasks.cancel()

    async def _retitle(
        self, store: ConversationStore, caller: Caller, conversation_id: str, question: str, text: str
    ) -> None:
        try:
            automatic = (await store.find(caller, conversation_id)).title
            title = await self._title(caller, question, text)
            if title and (await store.find(caller, conversation_id)).title == automatic:
                await store.change(caller, conversation_id, title=title)
        except ApiError as error:
            log.info(
                "No title could be written for the conversation %s, which keeps its first words as its title: %s",
                conversation_id,
                error.full_message,
            )

    async def _title(self, caller: Caller, question: str, text: str) -> str:
        """Return the model's title on one line, without quotes.

        Raises:
            ApiError: The model did not answer.
        """
        content = _INSTRUCTION.format(question=question[:MAX_READ_CHARACTERS], answer=text[:MAX_READ_CHARACTERS])
        context = RequestContext(f"req_{secrets.token_hex(16)}", caller=caller, work_bytes=len(content))
        context.background_task = asyncio.current_task()  # which ends if the caller's key is revoked
        for check in self._checks:
            check.adopt(context)
        try:
            title = await answer_message(self._service, self._model, content, MAX_TITLE_TOKENS, context)
        finally:
            for check in self._checks:
                check.after(context, Outcome(200, context.finish_reason, context.usage))
        return " ".join(title.split()).strip("\"'*# ")
