"""POST /v1/responses and its siblings: items instead of messages, typed events, answers that can be referred to."""
