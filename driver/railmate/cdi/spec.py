"""One CDI spec a claim: kind ``<driver>/claim``, one CDI device for each allocated device.

The device names hold the claim's UID, since runtimes cache specs and a device name must never mean
two things. Pure: what goes in is decided by ``railmate.claims``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: hostPath of deviceNodes came with 0.5.0; nothing newer is used, so older runtimes read it too.
CDI_VERSION = "0.5.0"
#: Seconds. The gate reads one small file; a hook that hangs would hang the container's start.
_HOOK_TIMEOUT = 5


@dataclass(frozen=True, slots=True)
class DeviceNode:
    path: str  # in the container
    host_path: str  # on the node
    mode: int | None = None  # permission bits in the container; None: as on the node

    @classmethod
    def of(cls, name: str, dev_root: Path, mode: int | None = None) -> DeviceNode:
        """The node called ``name`` below /dev, which the node's own /dev has as ``dev_root``."""
        return cls(f"/dev/{name}", str(dev_root / name), mode)


@dataclass(frozen=True, slots=True)
class Gate:
    """The createRuntime hook that lets a container start only when its sandbox holds the claim's devices."""

    executable: Path  # on the node
    attached_dir: Path  # on the node
    claim_uid: str
    driver: str
    nodes: str = ""  # a word that tells the device nodes of this spec from those of another; see `nodes_word`


@dataclass(frozen=True, slots=True)
class CdiDevice:
    name: str
    nodes: tuple[DeviceNode, ...] = ()
    metadata_file: Path | None = None  # on the node
    metadata_mount: str | None = None  # in the container
    gate: Gate | None = None
    topology_file: Path | None = None  # on the node
    topology_mount: str | None = None  # in the container

    @property
    def is_empty(self) -> bool:
        """Runtimes refuse a CDI device that edits nothing."""
        return not (self.nodes or self.metadata_file or self.gate or self.topology_file)


def nodes_word(nodes: Iterable[DeviceNode]) -> str:
    """Another word for other device nodes, "" for none. In whatever order: a container gets all of them."""
    paths = sorted(node.host_path for node in nodes)
    return hashlib.sha256("\n".join(paths).encode()).hexdigest()[:16] if paths else ""


def nodes_words_of(driver: str, hooks: Iterable[Sequence[str]]) -> dict[str, str]:
    """What the gates among a container's createRuntime hooks (by their arguments) say of their claims, by UID."""
    gates = (hook for hook in hooks if len(hook) == 5 and hook[3] == driver)
    return {hook[2]: hook[4] for hook in gates}


def kind(driver: str) -> str:
    return f"{driver}/claim"


def device_id(driver: str, name: str) -> str:
    """The fully qualified name that the kubelet passes on: ``<driver>/claim=<name>``."""
    return f"{kind(driver)}={name}"


def device_name(claim_uid: str, device: str) -> str:
    """``device`` is what tells it from the claim's others: its name, with its share where it has one."""
    return f"{claim_uid}-{device}"


def claim_uid_of(driver: str, cdi_id: str) -> str | None:
    """The claim behind one of our CDI IDs, None for anybody else's."""
    prefix = f"{kind(driver)}="
    if not cdi_id.startswith(prefix):
        return None
    return cdi_id.removeprefix(prefix)[:36]  # a UID is a UUID in text form: 36 characters


def file_name(driver: str, claim_uid: str) -> str:
    """One file a claim. The name is ours to choose; the driver's name in it keeps drivers apart."""
    return f"{driver}-claim-{claim_uid}.json"


def render(driver: str, devices: Sequence[CdiDevice]) -> dict[str, Any]:
    """The spec as a JSON object. Devices that edit nothing are left out."""
    return {
        "cdiVersion": CDI_VERSION,
        "kind": kind(driver),
        "devices": [{"name": d.name, "containerEdits": _edits(d)} for d in devices if not d.is_empty],
    }


def _mount(source: Path, target: str) -> dict[str, Any]:
    return {
        "hostPath": str(source),
        "containerPath": target,
        "options": ["ro", "bind", "nosuid", "nodev", "noexec"],
    }


def _edits(device: CdiDevice) -> dict[str, Any]:
    edits: dict[str, Any] = {}
    if device.nodes:
        edits["deviceNodes"] = [
            {"path": n.path, "hostPath": n.host_path, "permissions": "rw"}
            | ({"fileMode": n.mode} if n.mode is not None else {})
            for n in device.nodes
        ]
    mounts = (
        (device.metadata_file, device.metadata_mount),
        (device.topology_file, device.topology_mount),
    )
    found = [_mount(source, target) for source, target in mounts if source and target]
    if found:
        edits["mounts"] = found
    if device.gate:
        gate = device.gate
        edits["hooks"] = [
            {
                "hookName": "createRuntime",
                "path": str(gate.executable),
                # argv[0] first, as OCI hooks want it
                "args": [
                    gate.executable.name,
                    str(gate.attached_dir),
                    gate.claim_uid,
                    gate.driver,
                    *([gate.nodes] if gate.nodes else []),
                ],
                "timeout": _HOOK_TIMEOUT,
            }
        ]
    return edits
