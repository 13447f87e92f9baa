"""What can go wrong while the kernel is changed."""

from __future__ import annotations

from railmate.errors import RailmateError


class AttachError(RailmateError):
    """A device could not be attached or taken back."""

    code = 0  # the kernel's error number (errno), where one is the cause


class UnfitError(AttachError):
    """The device cannot do what is asked, now or later."""


class NamespaceGoneError(AttachError):
    """The pod's network namespace does not exist any more."""
