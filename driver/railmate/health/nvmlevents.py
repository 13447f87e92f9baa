"""Listens to NVIDIA's management library and prints what happens to GPUs: a program, run by ``nvml.py``.

    python -m railmate.health.nvmlevents SECONDS LIBRARY ADDRESS…

SECONDS are those between two looks; events are heard at once. One JSON object a line: ``{"address": …, "lost": true}``
at the first look and whenever that changes, ``{"address": …, "xid": 79}``,
``{"problem": "sentence"}``, and ``{}`` with each look so that silence means that the library hangs. Ends when its
standard input does.

Events, calls and codes are those of NVIDIA's NVML reference (Event Handling Methods; NVML_ERROR_GPU_IS_LOST). A GPU
counts as lost when a call about it says so, or with Xid 79, "GPU has fallen off the bus", until a later call succeeds.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import sys
from collections.abc import Sequence
from typing import Any

from railmate.inventory.nvmlprobe import Library, Refused

_XID_EVENT = 0x8  # nvmlEventTypeXidCriticalError
_TIMEOUT, _GPU_IS_LOST = 10, 15
_OFF_THE_BUS = 79


class _EventData(ctypes.Structure):
    """nvmlEventData_t of nvmlEventSetWait_v2."""

    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Listener:
    def __init__(self, library: Library, say: Any, period: float) -> None:
        self._library, self._say, self._period = library, say, period
        self._devices: dict[str, ctypes.c_void_p] = {}
        self._events: ctypes.c_void_p | None = None
        self._lost: dict[str, bool] = {}

    def begin(self, addresses: Sequence[str]) -> None:
        """Raises Refused when the library cannot be used at all."""
        self._library.call("nvmlInit_v2")
        for address in addresses:
            try:
                self._devices[address] = self._library.handle(
                    "nvmlDeviceGetHandleByPciBusId_v2", ctypes.c_char_p(address.encode())
                )
            except Refused as refused:
                if refused.code == _GPU_IS_LOST:
                    self._set(address, lost=True)
                self._say({"problem": f"{address}: {refused}"})
        try:
            self._events = self._library.handle("nvmlEventSetCreate")
            for device in self._devices.values():
                self._library.call(
                    "nvmlDeviceRegisterEvents", device, ctypes.c_ulonglong(_XID_EVENT), self._events
                )
        except (
            Refused
        ) as refused:  # a virtual machine's driver may have none; looking tells as well, only later
            self._say({"problem": f"no events, only a look every {self._period:g} s: {refused}"})
            self._events = None

    def look(self) -> None:
        """Ask each GPU something that its driver has to ask the GPU for."""
        for address, device in self._devices.items():
            try:
                self._library.memory(device)
            except Refused as refused:
                if refused.code == _GPU_IS_LOST:
                    self._set(address, lost=True)
            else:
                self._set(address, lost=False)
        self._say({})

    def wait(self) -> None:
        """For a period at most; shorter when there was an event."""
        if self._events is None:
            select.select([], [], [], self._period)
            return
        event = _EventData()
        try:
            self._library.call(
                "nvmlEventSetWait_v2",
                self._events,
                ctypes.byref(event),
                ctypes.c_uint(int(self._period * 1000)),
            )
        except Refused as refused:
            if refused.code is None:  # a driver older than the call
                self._say({"problem": f"no events, only a look every {self._period:g} s: {refused}"})
                self._events = None
            elif refused.code not in (_TIMEOUT, _GPU_IS_LOST):
                raise
            if refused.code == _GPU_IS_LOST:  # it does not say which, and says so again at once
                select.select([], [], [], min(1.0, self._period))
            return
        for address, device in self._devices.items():
            if device.value == event.device:
                self._say({"address": address, "xid": event.data})
                if event.data == _OFF_THE_BUS:
                    self._set(address, lost=True)
                    select.select([], [], [], self._period)  # what is asked too early still gets an answer

    def _set(self, address: str, *, lost: bool) -> None:
        if self._lost.get(address) != lost:
            self._lost[address] = lost
            self._say({"address": address, "lost": lost})


def main(arguments: Sequence[str]) -> int:
    seconds, path, *addresses = arguments
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the library has no business there

    def say(word: dict[str, object]) -> None:
        output.write(json.dumps(word) + "\n")
        output.flush()

    try:
        listener = Listener(Library(path), say, float(seconds))
        listener.begin(addresses)
        while not select.select([sys.stdin], [], [], 0)[0]:
            listener.look()
            listener.wait()
    except OSError as error:
        say({"problem": f"cannot be loaded ({error})"})
    except Refused as refused:
        say({"problem": str(refused)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
