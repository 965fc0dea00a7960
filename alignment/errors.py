"""The error of somebody's input: shown as one line, without a traceback."""


class UserError(ValueError):
    """What was given, what is accepted and what to do, in one line. The CLI prints it and exits with status 2."""
