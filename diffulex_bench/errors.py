"""The one error of the bench that a user can cause; the command line turns it into exit code 2."""

from __future__ import annotations


class BenchError(ValueError):
    """A wrong setting, file or task name; the message is one sentence that says what to do next."""
