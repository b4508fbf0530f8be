"""What can be wrong with a grammar."""


class GrammarError(ValueError):
    """A grammar that does not compile. The message is for who wrote it."""


class NoTableError(GrammarError):
    """A grammar that may be right, but that no table is made of: another backend may hold it."""


class LimitError(NoTableError):
    """A grammar that would take more than the limits allow."""
