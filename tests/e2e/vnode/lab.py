"""What the tests do with the virtual node: pods, the node's own state, commands in it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import yaml

from e2e.lab import PLUGIN_DIR, eventually
from harness.gobuild import program
from harness.shell import HarnessError, run
from harness.vnode_channel import Channel
from harness.vnode_images import TOOLS_IMAGE
from harness.vnode_join import NODE, Joined
from harness.vnode_machine import Settings, Switch, switches
from railmate_api.attributes import DRIVER_NAME

#: The fourth NIC has a rule, of which it lacks only the MTU when the driver starts; see test_provisioning.
PROVISIONED = "rail3"
PROVISIONING: dict[str, Any] = {
    "rules": [{"select": {"name": PROVISIONED}, "vfs": Settings().vfs, "mtu": 3000}]
}
#: Seconds for what takes a few on hardware: everything in the node is emulated, on a machine that may be busy.
PATIENCE = 300
#: Of links: numbers that the kernel gives anew, and times; an address is tentative for the first seconds of its life.
_CHANGING = {
    "ifindex", "link_index", "valid_life_time", "preferred_life_time", "netdev_index", "tentative", "netns-immutable",
}  # fmt: skip
#: All that `VnodeLab.state` compares, by one command: a process costs a tenth of a second and more. ethtool tells
#: offloads, rings and coalescing of every netdev at once.
_CUT = "=== next ==="
_FILES = f"ls -d {PLUGIN_DIR}/claims/* {PLUGIN_DIR}/attached/* /run/cdi/* 2> /dev/null || true"
_LOOK = f"; echo '{_CUT}'; ".join([
    "ip -j -d address show", "rdma -j dev show", "rdma -j link show",
    "for what in k g c; do ethtool -$what '*'; done",
    _FILES,
])  # fmt: skip

#: Of the rdma cgroup: everything, and nothing.
RDMA_ALL, RDMA_NONE = "hca_handle=max hca_object=max", "hca_handle=0 hca_object=0"


class VnodeLab:
    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self.switches: tuple[Switch, ...] = switches()

    @property
    def guest(self) -> Channel:
        return self.joined.node.channel

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout: float = PATIENCE) -> str:
        command = [program("kubectl"), "--kubeconfig", self.joined.kubeconfig]
        return run([*command, *arguments], stdin=stdin, timeout=timeout)

    @cached_property
    def devices(self) -> dict[str, dict[str, Any]]:
        """What the node publishes: device name to attributes (plain values), all with their domain."""
        return {
            device["name"]: {
                name if "/" in name else f"{DRIVER_NAME}/{name}": next(iter(value.values()))
                for name, value in device["attributes"].items()
            }
            for device in self.published()
        }

    def published(self) -> list[dict[str, Any]]:
        """The devices of the node's slices as they are now, in the order of their names."""
        items = json.loads(self.kubectl("get", "resourceslices", "-o", "json"))["items"]
        specs = [item["spec"] for item in items if item["spec"].get("nodeName") == NODE]
        return sorted(
            (one for spec in specs for one in spec.get("devices") or []), key=lambda one: one["name"]
        )

    def of_kind(self, kind: str) -> dict[str, dict[str, Any]]:
        return {name: values for name, values in self.devices.items() if values["railmate.dev/kind"] == kind}

    @contextmanager
    def workspace(self) -> Iterator[VnodeWorkspace]:
        """A namespace; afterwards its pods are gone."""
        name = f"vnode-{uuid.uuid4().hex[:8]}"
        self.kubectl("create", "namespace", name)
        workspace = VnodeWorkspace(self, name)
        try:
            yield workspace
        finally:
            workspace.delete_pods()
            self.kubectl("delete", "namespace", name, "--wait=false")

    def state(self) -> dict[str, Any]:
        """The node as a claim could leave it changed, field by field: links, VFs, addresses, RDMA devices, files.

        Keys are paths such as ``link.rail0v1.mtu``.
        """
        said = self.guest.run("sh", "-c", _LOOK).split(_CUT)
        addresses, rdma, rdma_links = (json.loads(one) for one in said[:3])
        links = [
            link
            for link in addresses
            if link["ifname"] not in ("eth0", "cni0") and link.get("linkinfo", {}).get("info_kind") != "veth"
        ]
        return flatten({
            "link": {link["ifname"]: link for link in links},
            "rdma": {one["ifname"]: one for one in rdma},
            "rdma-link": {f"{one['ifname']}/{one['port']}": one for one in rdma_links},
            "ethtool": paragraphs(said[3]),
            "files": said[4].split(),
        })  # fmt: skip

    def rdma_devices(self) -> set[str]:
        """Those that the node sees; all of them are of NICs that claims may have."""
        return {one["ifname"] for one in json.loads(self.guest.run("rdma", "-j", "dev", "show"))}

    def kept_of_vfs(self, physical: str) -> list[dict[str, Any]]:
        """What a physical function keeps of its VFs, as ``ip link`` tells it."""
        (link,) = json.loads(self.guest.run("ip", "-j", "-d", "link", "show", physical))
        return list(link["vfinfo_list"])

    def await_state(self, before: dict[str, Any]) -> None:
        """Every field is what it was. Fails with the fields that differ.

        The driver's files go last: until they are as they were the node does nothing else than look at them.
        """
        loop = f'until [ "$({_FILES})" = "$1" ]; do sleep 0.5; done'
        wanted = "\n".join(before["files"])
        self.guest.execute(["timeout", str(PATIENCE), "sh", "-c", loop, "sh", wanted], timeout=PATIENCE + 30)

        def same() -> bool:
            differing.clear()
            now = self.state()
            differing.update(
                {
                    key: (before.get(key, "(absent)"), now.get(key, "(absent)"))
                    for key in sorted(before.keys() | now.keys())
                    if before.get(key, "(absent)") != now.get(key, "(absent)")
                }
            )
            return not differing

        differing: dict[str, tuple[Any, Any]] = {}
        try:
            eventually(same, "the node is as it was", seconds=PATIENCE)
        except AssertionError as error:
            lines = "\n".join(f"  {key}: was {was!r}, is {now!r}" for key, (was, now) in differing.items())
            raise AssertionError(f"the node is not as it was:\n{lines}") from error

    def log(self) -> str:
        """The end of the driver's log."""
        return self.kubectl("-n", "railmate", "logs", "daemonset/railmate", "--tail=40")


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Nested objects as one mapping, path to leaf; lists of plain values stay lists. Without what always changes."""
    if isinstance(value, dict):
        items = [(str(key), one) for key, one in value.items() if key not in _CHANGING]
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        items = [(str(index), one) for index, one in enumerate(value)]
    else:
        return {path: value}
    found: dict[str, Any] = {}
    for key, one in items:
        found.update(flatten(one, f"{path}.{key}" if path else key))
    return found


def paragraphs(text: str) -> dict[str, list[str]]:
    """Of ethtool's answers, each one's first line and the others; of the rails."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if first := re.fullmatch(r"\S.* (\S+):", line):
            lines = found.setdefault(line, []) if first[1].startswith("rail") else []
        elif line:  # after the last netdev there is one more that is empty, whichever that is
            lines.append(line)
    return found


class VnodeWorkspace:
    """A namespace of the control plane."""

    def __init__(self, lab: VnodeLab, namespace: str) -> None:
        self.lab, self.namespace = lab, namespace

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout: float = PATIENCE) -> str:
        return self.lab.kubectl("-n", self.namespace, *arguments, stdin=stdin, timeout=timeout)

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return dict(json.loads(self.kubectl("get", kind, name, "-o", "json")))

    def await_ready(self, *pods: str) -> None:
        names = [f"pod/{pod}" for pod in pods]
        try:
            self.kubectl(
                "wait", "--for=condition=Ready", *names, f"--timeout={PATIENCE}s", timeout=PATIENCE + 30
            )
        except HarnessError as error:
            said = self.kubectl("describe", *names)
            raise AssertionError(f"{error}\n{said}\nthe driver's log ends with:\n{self.lab.log()}") from error

    def delete_pods(self) -> None:
        self.kubectl("delete", "pod", "--all", f"--timeout={PATIENCE}s", timeout=PATIENCE + 30)

    def in_pod(self, pod: str, command: str) -> str:
        """A shell command's output. Raises HarnessError when it fails."""
        return self.kubectl("exec", pod, "--", "sh", "-c", command)

    def tries(self, pod: str, *commands: str) -> list[tuple[int, str]]:
        """Exit status and both streams of each shell command, one after the other: each exec costs seconds."""
        script = "; ".join(f'({command}) 2>&1; echo "{_CUT} $?"' for command in commands)
        pieces = re.split(rf"{_CUT} (\d+)\n?", self.in_pod(pod, script))
        return [(int(status), said) for said, status in zip(pieces[::2], pieces[1::2], strict=False)]

    def claims(self, pod: str) -> list[dict[str, Any]]:
        """The pod's claims."""
        names = [one["resourceClaimName"] for one in self.get("pod", pod)["status"]["resourceClaimStatuses"]]
        return [self.get("resourceclaim", name) for name in names]

    def allocated(self, pod: str) -> list[dict[str, Any]]:
        """Attributes of the devices of the pod's first claim."""
        results = self.claims(pod)[0]["status"]["allocation"]["devices"]["results"]
        return [self.lab.devices[result["device"]] for result in results]

    def statuses(self, pod: str) -> list[dict[str, Any]]:
        """What the driver says of the devices of all the pod's claims, when it has looked at them in the pod."""

        def told() -> list[list[dict[str, Any]]]:
            found = [claim["status"].get("devices", []) for claim in self.claims(pod)]
            return found if all(found) else []

        listed = eventually(told, f"status.devices of the claims of {pod}", seconds=PATIENCE)
        return [device for devices in listed for device in devices]

    def rdma_devices(self, pod: str) -> set[str]:
        """Of the pod's claims."""
        return {nic["rdmaDevice"] for status in self.statuses(pod) for nic in status["data"]["nics"]}

    def rdma_limits(self, pod: str) -> dict[str, str]:
        """By RDMA device, what the kernel says of the cgroup of the pod's container."""
        (status,) = self.get("pod", pod)["status"]["containerStatuses"]
        container = status["containerID"].removeprefix("containerd://")
        find = f"cat $(find /sys/fs/cgroup -path '*{container}*' -name rdma.max)"
        lines = self.lab.guest.run("sh", "-c", find).splitlines()
        return {device: rest for device, _, rest in (line.strip().partition(" ") for line in lines)}


def pod(name: str, *templates: str, root: bool = False) -> dict[str, Any]:
    """A pod that sleeps, with a claim from each template.

    Its user is not root and has no capability; ``root``: it is, and may change its network.
    """
    security: dict[str, Any] = {
        "runAsUser": 1000,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    container = {
        "name": "main",
        "image": TOOLS_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", "trap exit TERM; sleep 2147483647 & wait"],
        "resources": {"claims": [{"name": template} for template in templates]},
        "securityContext": {"capabilities": {"add": ["NET_ADMIN"]}} if root else security,
    }
    spec = {
        "terminationGracePeriodSeconds": 2,
        "containers": [container],
        "resourceClaims": [{"name": one, "resourceClaimTemplateName": one} for one in templates],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def pair_template(name: str, switch: Switch, count: int = 1, **config: Any) -> dict[str, Any]:
    """A claim template for pairs below a switch; ``config``: of RdmaVfConfig."""
    return _template(name, "gpu-rdma-pair.railmate.dev", switch, count, config)


def vf_template(name: str, switch: Switch, count: int = 1, **config: Any) -> dict[str, Any]:
    """The same for lone VFs."""
    return _template(name, "rdma-vf.railmate.dev", switch, count, config)


def _template(
    name: str, device_class: str, switch: Switch, count: int, config: dict[str, Any]
) -> dict[str, Any]:
    where = f'device.attributes["railmate.dev"].?pcieSwitch.orValue("") == "{switch.address}"'
    exactly = {"deviceClassName": device_class, "count": count, "selectors": [{"cel": {"expression": where}}]}
    devices: dict[str, Any] = {"requests": [{"name": "main", "exactly": exactly}]}
    if config:
        parameters = {"apiVersion": "railmate.dev/v1alpha1", "kind": "RdmaVfConfig", **config}
        devices["config"] = [{"opaque": {"driver": "railmate.dev", "parameters": parameters}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": devices}},
    }
