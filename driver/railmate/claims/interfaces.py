"""What a claim's interfaces are called in its pod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from railmate.claims.allocation import ClaimError
from railmate.claims.records import ClaimRef

_LONGEST = 15  # IFNAMSIZ of the kernel, less its end


class InterfaceNames:
    """Gives each NIC of the claim ``ref`` a name. ``taken`` are those that other claims of its pods have;
    ``configured`` those that its config asks for, of which default names keep clear, whichever request comes first."""

    def __init__(self, ref: ClaimRef, taken: Iterable[str], configured: Iterable[str]) -> None:
        self._ref, self._taken, self._configured = ref, set(taken), frozenset(configured)
        self._named: Counter[str] = Counter()  # request -> how many NICs have a name from its config

    def name(self, request: str, wanted: str | None) -> str:
        """For the next NIC of ``request``, whose config asks for ``wanted``. Raises ClaimError."""
        name = self._default() if wanted is None else self._numbered(request, wanted)
        if name in self._taken:
            raise ClaimError(
                f"{self._ref}: interface name {name!r} is used twice in one pod. "
                "Give each request an interfaceName of its own."
            )
        self._taken.add(name)
        return name

    def _default(self) -> str:
        number = 1
        while f"net{number}" in self._taken | self._configured:
            number += 1
        return f"net{number}"

    def _numbered(self, request: str, wanted: str) -> str:
        name = f"{wanted}{self._named[request] or ''}"
        self._named[request] += 1
        if len(name) > _LONGEST:
            raise ClaimError(
                f"{self._ref}: interface name {name!r} is longer than {_LONGEST} characters. "
                "Choose a shorter interfaceName: a number is appended for each further NIC of a request."
            )
        return name

    def refuse_long(self, partition: str) -> None:
        """Raise ClaimError for the interface in a ``partition`` whose name the kernel would not take."""
        if len(partition) > _LONGEST:
            raise ClaimError(
                f"{self._ref}: the partition's interface {partition!r} has a name longer than {_LONGEST} characters. "
                f"Choose an interfaceName of at most {_LONGEST - 5}."
            )
