"""HTTP itself: bodies, event streams, errors as answers, the context of a request, the checks that each one passes.

Nothing here knows a model or an API; what a client means by its body is read in the rooms of `gateway/openai/`.
"""
