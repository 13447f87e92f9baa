"""RDMA netlink without RDMA: the kernel's side of it, byte by byte, for machines whose kernel has none.

Simulated is the kernel of Linux 7.3 as seen in the virtual node (tests/e2e/vnode has the real one): devices of PCI
functions, which survive what their netdevs do, and soft ones, which end when their netdev leaves its namespace.
Numbers from include/uapi/rdma/rdma_netlink.h and linux/netlink.h.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

HOST_FD, POD_FD = 10, 11
HOST, POD = "host", "pod"
_GET, _SET, _NEWLINK, _DELLINK, _PORT_GET, _SYS_GET = (0x1400 + n for n in range(1, 7))


@dataclass
class Device:
    name: str
    guid: int = 0
    soft: str | None = None
    netdev: str | None = None
    namespace: str = HOST


@dataclass
class RdmaKernel:
    exclusive: bool = True
    devices: dict[int, Device] = field(default_factory=dict)
    netdevs: dict[str, str] = field(default_factory=dict)  # name -> namespace
    refusals: dict[int, int] = field(default_factory=dict)  # command -> errno
    here: str = HOST  # the namespace of the thread that asks
    changes: list[str] = field(default_factory=list)
    supported: bool = True

    def add(self, name: str, **more: object) -> Device:
        device = Device(name, **more)  # type: ignore[arg-type]
        self.devices[max(self.devices, default=-1) + 1] = device
        return device

    def enter(self, fd: int) -> None:
        self.here = self.place(fd)

    def place(self, fd: int) -> str:
        """Which namespace it is the descriptor of."""
        return {HOST_FD: HOST, POD_FD: POD}[fd]

    def move_netdev(self, name: str, namespace: str) -> None:
        """What moving a netdev does to RDMA devices over it."""
        self.netdevs[name] = namespace
        self.devices = {i: d for i, d in self.devices.items() if not (d.soft and d.netdev == name)}

    def named(self, name: str) -> Device:
        (found,) = [device for device in self.devices.values() if device.name == name]
        return found

    def socket(self, *_: object) -> Socket:
        if not self.supported:
            raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")
        return Socket(self, self.here)


@dataclass
class Socket:
    kernel: RdmaKernel
    namespace: str
    answers: list[bytes] = field(default_factory=list)
    closed: bool = False

    def settimeout(self, _: float) -> None: ...

    def bind(self, _: object) -> None: ...

    def setsockopt(self, *_: int) -> None: ...

    def close(self) -> None:
        self.closed = True

    def recv(self, _: int) -> bytes:
        return self.answers.pop(0)

    def send(self, request: bytes) -> None:
        length, kind, flags, sequence, _ = struct.unpack_from("=IHHII", request)
        assert length == len(request)
        assert flags in (0x301, 0x5)
        handlers: dict[int, Callable[[dict[int, bytes]], list[bytes]]] = {
            _GET: self._get, _SET: self._set, _NEWLINK: self._newlink, _DELLINK: self._dellink,
            _PORT_GET: self._port_get, _SYS_GET: self._sys_get,
        }  # fmt: skip
        code = self.kernel.refusals.get(kind, 0)
        bodies: list[bytes] = []
        if not code:
            try:
                bodies = handlers[kind](_attributes(request[16:]))
            except OSError as error:
                code = error.errno or 0
        self.answers = [_message(kind, body, sequence) for body in bodies]
        end = 3 if flags == 0x301 and not code else 2
        self.answers.append(struct.pack("=IHHIIi", 20, end, 0, sequence, 0, -code))

    def _seen(self) -> dict[int, Device]:
        shared = not self.kernel.exclusive
        return {i: d for i, d in self.kernel.devices.items() if shared or d.namespace == self.namespace}

    def _device(self, asked: dict[int, bytes]) -> Device:
        (index,) = struct.unpack("=I", asked[1])
        if index not in self._seen():
            raise OSError(errno.EINVAL, "")
        return self.kernel.devices[index]

    def _get(self, _: dict[int, bytes]) -> list[bytes]:
        return [
            _attribute(1, struct.pack("=I", index))
            + _attribute(2, device.name.encode() + b"\0")
            + _attribute(6, struct.pack("=Q", device.guid))
            for index, device in self._seen().items()
        ]

    def _port_get(self, asked: dict[int, bytes]) -> list[bytes]:
        device = self._device(asked)
        body = _attribute(1, asked[1]) + _attribute(3, struct.pack("=I", 1))
        if device.netdev and self.kernel.netdevs.get(device.netdev) == self.namespace:
            body += _attribute(51, device.netdev.encode() + b"\0")
        return [body]

    def _sys_get(self, _: dict[int, bytes]) -> list[bytes]:
        return [_attribute(66, b"\0" if self.kernel.exclusive else b"\1")]

    def _set(self, asked: dict[int, bytes]) -> list[bytes]:
        device = self._device(asked)
        if 2 in asked:
            name = asked[2].rstrip(b"\0").decode()
            if any(one.name == name for one in self.kernel.devices.values()):  # of all namespaces
                raise OSError(errno.EEXIST, "")
            device.name = name
            self.kernel.changes.append(f"name {device.name}")
        if 68 in asked:
            if not self.kernel.exclusive:
                raise OSError(errno.EOPNOTSUPP, "")
            if device.namespace != self.kernel.here:
                raise OSError(errno.ENODEV, "")
            (fd,) = struct.unpack("=I", asked[68])
            device.namespace = self.kernel.place(fd)
            self.kernel.changes.append(f"{device.name} to {device.namespace}")
        return []

    def _newlink(self, asked: dict[int, bytes]) -> list[bytes]:
        name, link_type, netdev = (asked[n].rstrip(b"\0").decode() for n in (2, 65, 51))
        if self.kernel.netdevs.get(netdev) != self.namespace:
            raise OSError(errno.ENODEV, "")
        if any(device.name == name for device in self.kernel.devices.values()):
            raise OSError(errno.EEXIST, "")
        self.kernel.add(name, soft=link_type, netdev=netdev)  # in the first namespace, whoever asked
        self.kernel.changes.append(f"{link_type} {name} over {netdev}")
        return []

    def _dellink(self, asked: dict[int, bytes]) -> list[bytes]:
        device = self._device(asked)
        self.kernel.devices = {i: d for i, d in self.kernel.devices.items() if d is not device}
        self.kernel.changes.append(f"{device.name} deleted")
        return []


def _attributes(body: bytes) -> dict[int, bytes]:
    found = {}
    while body:
        size, kind = struct.unpack_from("=HH", body)
        found[kind] = body[4:size]
        body = body[(size + 3) & ~3 :]
    return found


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _message(kind: int, body: bytes, sequence: int) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 2, sequence, 0) + body
