"""Why there is no grammar."""


class NotEnforceableError(Exception):
    """Something asked for that no grammar made here can hold an answer to. The text says what."""


class NothingError(NotEnforceableError):
    """A schema that no value satisfies."""


class TooCostlyError(Exception):
    """What was asked for takes more work than one grammar may. Where is chance, so it is nothing to be left out."""
