"""One failure must not stop the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable

from railmate.errors import RailmateError

log = logging.getLogger(__name__)


def attempt(verb: Callable[[], object]) -> bool:
    """Do it if it can be done; whether it could. Failures are logged."""
    try:
        verb()
    except RailmateError as error:
        log.warning("%s", error)
    except Exception:
        log.exception("unexpected error; going on with the rest")
    else:
        return True
    return False
