"""HTTP itself: bodies, event streams, errors as answers, the context of a request, the checks that each one passes.

Nothing here knows a model, and of an API only how it tells an error; what a client means by its body is read in the
rooms of `gateway/openai/`.
"""
