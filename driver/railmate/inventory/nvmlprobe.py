"""Asks NVIDIA's management library about GPUs and prints what it says: a program, run by ``nvml.py``.

    nvmlprobe.py SECONDS LIBRARY ADDRESS…

It is a process of its own because the library may hang in the driver or crash, and neither may stop
discovery. It needs the standard library only and so starts fast (``python -I -S``). Output is one JSON
object a line, written as soon as it is known, so that what came before a hang is not lost:
``{"address": …, one attribute or more}``, ``{"driverVersion": …}``, ``{"problem": "sentence"}``.

The library is called through ctypes, not nvidia-ml-py: these functions and structures have been the same
since NVML 8 (MIG since 11), and a symbol that an older driver lacks is one attribute less.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

_SUCCESS, _NOT_SUPPORTED, _NOT_FOUND = 0, 3, 6
_MEANINGS = {
    1: "not initialised",
    2: "invalid argument",
    4: "no permission",
    9: "the NVIDIA driver is not loaded",
    12: "the library does not match its driver",
    15: "the GPU is lost",
    17: "the operating system keeps it from the GPU",
    18: "library and kernel driver have different versions; reboot or reload the driver",
    999: "unknown error",
}
_TEXT_BYTES = 96
_MOST_LINKS = 36
_MIG_ENABLED = 1
_ARCHITECTURES = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada Lovelace",
    9: "Hopper",
    10: "Blackwell",
}


class _Memory(ctypes.Structure):
    """nvmlMemory_t, bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Pci(ctypes.Structure):
    """nvmlPciInfo_t of the calls that end in _v2 or _v3."""

    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class Refused(Exception):
    """A call that did not succeed; ``code`` is NVML's, None for a symbol that the library lacks."""

    def __init__(self, name: str, code: int | None) -> None:
        reason = "is not in this library" if code is None else _MEANINGS.get(code, f"error {code}")
        super().__init__(f"{name}: {reason}")
        self.code = code


class Library:
    """The calls, each of which raises Refused. Out parameters are returned."""

    def __init__(self, path: str) -> None:
        """Raises OSError when the library cannot be loaded."""
        self._library = ctypes.CDLL(path)

    def call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise Refused(name, None) from None
        code = function(*arguments)
        if code != _SUCCESS:
            raise Refused(name, code)

    def handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        value = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(value))
        return value

    def text(self, name: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self.call(name, *arguments, buffer, ctypes.c_uint(_TEXT_BYTES))
        text = buffer.value.decode(errors="replace")
        if not text or not text.isprintable():
            raise ValueError(repr(text))
        return text

    def number(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_uint()
        self.call(name, *arguments, ctypes.byref(value))
        return value.value

    def numbers(self, name: str, *arguments: Any) -> tuple[int, int]:
        first, second = ctypes.c_uint(), ctypes.c_uint()
        self.call(name, *arguments, ctypes.byref(first), ctypes.byref(second))
        return first.value, second.value

    def memory(self, device: ctypes.c_void_p) -> int:
        value = _Memory()
        self.call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(value))
        return int(value.total)

    def remote(self, device: ctypes.c_void_p, link: int) -> str:
        value = _Pci()
        self.call("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, ctypes.c_uint(link), ctypes.byref(value))
        domain, _, rest = value.bus_id.decode(errors="replace").lower().partition(":")
        return f"{int(domain, 16):04x}:{rest}"


def ask(library: Library, addresses: list[str], say: Callable[[dict[str, Any]], None]) -> None:
    library.call("nvmlInit_v2")
    say_what_is_known(say, {}, {"driverVersion": lambda: library.text("nvmlSystemGetDriverVersion")})
    for address in addresses:
        try:
            device = library.handle("nvmlDeviceGetHandleByPciBusId_v2", ctypes.c_char_p(address.encode()))
        except Refused as refused:
            say({"problem": f"{address}: {refused}"})
            continue
        ask_device(library, address, device, say)
    library.call("nvmlShutdown")


def ask_device(
    library: Library, address: str, device: ctypes.c_void_p, say: Callable[[dict[str, Any]], None]
) -> None:
    who = {"address": address}
    say_what_is_known(
        say,
        who,
        {
            "uuid": lambda: library.text("nvmlDeviceGetUUID", device),
            "product": lambda: library.text("nvmlDeviceGetName", device),
            "memoryBytes": lambda: library.memory(device),
            "architecture": lambda: _ARCHITECTURES.get(library.number("nvmlDeviceGetArchitecture", device)),
            "computeCapability": lambda: "{}.{}".format(
                *library.numbers("nvmlDeviceGetCudaComputeCapability", device)
            ),
        },
    )
    say_what_is_known(
        say,
        who,
        {"mig": lambda: library.numbers("nvmlDeviceGetMigMode", device)[0] == _MIG_ENABLED},
    )
    say_what_is_known(say, who, {"instances": lambda: mig_instances(library, device)})
    say_what_is_known(say, who, {"links": lambda: links(library, device)})


def say_what_is_known(
    say: Callable[[dict[str, Any]], None], who: dict[str, str], questions: dict[str, Callable[[], Any]]
) -> None:
    """Says the answers; a refusal costs its attribute, and is told unless it only means "not on this GPU"."""
    known: dict[str, Any] = dict(who)
    for name, question in questions.items():
        try:
            known[name] = question()
        except Refused as refused:
            if refused.code not in (_NOT_SUPPORTED, None):
                say({"problem": f"{who.get('address', 'the driver')}: {refused}"})
        except ValueError as error:
            say({"problem": f"{who.get('address', 'the driver')}: {name} makes no sense ({error})"})
    if len(known) > len(who):
        say(known)


def mig_instances(library: Library, device: ctypes.c_void_p) -> list[dict[str, Any]]:
    if library.numbers("nvmlDeviceGetMigMode", device)[0] != _MIG_ENABLED:
        return []
    found = []
    for index in range(library.number("nvmlDeviceGetMaxMigDeviceCount", device)):
        try:
            instance = library.handle("nvmlDeviceGetMigDeviceHandleByIndex", device, ctypes.c_uint(index))
        except Refused as refused:
            if refused.code in (_NOT_FOUND, _NOT_SUPPORTED):
                continue  # a slot without an instance
            raise
        found.append(
            {
                "uuid": library.text("nvmlDeviceGetUUID", instance),
                "name": library.text("nvmlDeviceGetName", instance),
                "gpuInstance": library.number("nvmlDeviceGetGpuInstanceId", instance),
                "computeInstance": library.number("nvmlDeviceGetComputeInstanceId", instance),
                "memoryBytes": library.memory(instance),
            }
        )
    return found


def links(library: Library, device: ctypes.c_void_p) -> dict[str, Any]:
    """How many NVLinks are up, and what is at their other ends. A GPU without any has none to number."""
    up, peers = 0, set()
    for link in range(_MOST_LINKS):
        try:
            active = library.number("nvmlDeviceGetNvLinkState", device, ctypes.c_uint(link))
        except Refused as refused:
            if refused.code is None or link == 0:
                raise
            break  # past the last one
        if not active:
            continue
        up += 1
        try:
            peers.add(library.remote(device, link))
        except (Refused, ValueError):
            pass  # the count stands without the peer
    return {"up": up, "peers": sorted(peers)}


def main(arguments: list[str]) -> int:
    seconds, path, addresses = int(arguments[0]), arguments[1], arguments[2:]
    signal.alarm(seconds)  # ends the process inside a call that hangs, also when nobody waits any more
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the library has no business there

    def say(fact: dict[str, Any]) -> None:
        output.write(json.dumps(fact) + "\n")
        output.flush()

    try:
        library = Library(path)
    except OSError as error:
        say({"problem": f"cannot be loaded ({error})"})
        return 0
    try:
        ask(library, addresses, say)
    except Refused as refused:
        say({"problem": str(refused)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
