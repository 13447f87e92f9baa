"""The kubelet's calls that have no answer yet, so that the end of an instance can wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class Call(Protocol):
    """A call as gRPC has it (grpc.aio.ServicerContext)."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...


class Calls:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._open = 0
        self._none = asyncio.Event()
        self._none.set()

    def begin(self, call: Call) -> None:
        """It counts until its answer has been sent, or nobody waits for it any more."""
        self._open += 1
        self._none.clear()
        call.add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        self._open -= 1
        if not self._open:
            self._none.set()

    async def answered(self, seconds: float) -> bool:
        """Wait until none is open, at most so long; whether none is."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._none.wait()
        except TimeoutError:
            return False
        return True
