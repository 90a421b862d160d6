"""Why there is no grammar."""


class NotEnforceableError(Exception):
    """A request feature that these grammars cannot enforce. The message names it."""


class UnsatisfiableSchemaError(NotEnforceableError):
    """A schema that no value satisfies."""


class GrammarTooComplexError(Exception):
    """What was asked for takes more work than one grammar may. Where is chance, so it is nothing to be left out."""
