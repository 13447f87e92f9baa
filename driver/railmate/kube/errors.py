"""What a call to the API server can end in."""

from __future__ import annotations

from railmate.errors import RailmateError


class ApiError(RailmateError):
    """The API server answered an error; ``status`` is the HTTP code, 0 when it was not reached."""

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason

    @property
    def passes(self) -> bool:
        """Whether the same call may well succeed soon: the server was not reached, is overloaded or is starting."""
        return self.status in (0, 429) or self.status >= 500

    @property
    def not_found(self) -> bool:
        return self.status == 404

    @property
    def conflict(self) -> bool:
        return self.status == 409
