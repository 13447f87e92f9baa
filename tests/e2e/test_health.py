"""Health on the simulated node: what breaks there is in the pod's status and in the device's taint, and goes again.

The test writes into the tree of files that the driver takes for sysfs, as a driver of the kernel would.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.lab import Lab, Workspace, claim_spec, eventually, pod, template
from harness.machines import Machine
from harness.simnode import STATE

#: Seconds: a look of the driver (5), a refresh of the stream (8), a sync of the kubelet's pod status.
SOON = 45.0
#: And the calm of the driver before that (10).
WELL_AGAIN = 60.0


class Silicon:
    """The node's tree. Everything that was changed is put back, whatever happened."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._undo = lab, contextlib.ExitStack()

    @property
    def machine(self) -> Machine:
        return self._lab.machine

    def directory(self, address: str) -> str:
        return f"{STATE}/sys/bus/pci/devices/{address}"

    def write(self, texts: dict[str, str]) -> None:
        """Path to its new text, with the escapes of printf."""
        self._undo.callback(
            self._shell,
            "\n".join(
                f"if [ -s {path}.kept ]; then mv {path}.kept {path}; "
                f"elif [ -e {path}.kept ]; then rm {path}.kept {path}; fi"
                for path in texts
            ),
        )
        # an empty one stands for a file that was not there; what was kept first is what it was
        self._shell(
            "\n".join(
                f"[ -e {path}.kept ] || cp {path} {path}.kept 2> /dev/null || touch {path}.kept\n"
                f"printf {shlex.quote(text)} > {path}.new && mv {path}.new {path}"
                for path, text in texts.items()
            )
        )

    def unbind(self, address: str) -> None:
        link = f"{self.directory(address)}/driver"
        self._undo.callback(self._shell, f"[ ! -L {link}.away ] || mv -T {link}.away {link}")
        self._shell(f"mv -T {link} {link}.away")

    def bind(self, address: str) -> None:
        link = f"{self.directory(address)}/driver"
        self._shell(f"mv -T {link}.away {link}")

    def answer(self, *addresses: str) -> None:
        """The configuration spaces of these functions read as they should."""
        self.write({f"{self.directory(address)}/config": self._ids(address) for address in addresses})

    def _ids(self, address: str) -> str:
        function = self.machine.functions[address]
        ids = function.vendor.to_bytes(2, "little") + function.device.to_bytes(2, "little")
        return "".join(f"\\{byte:03o}" for byte in ids)

    def fall_off(self, address: str) -> None:
        self.write({f"{self.directory(address)}/config": "\\377" * 64})

    def set_port(self, address: str, *, up: bool) -> None:
        """The cable of a physical function, as its RDMA port and its netdev show it."""
        function = self.machine.functions[address]
        port = f"{self.directory(address)}/infiniband/{function.rdma_devices[0].name}/ports/1"
        netdev = f"{self.directory(address)}/net/{function.netdevs[0].name}"
        self.write(
            {
                f"{port}/phys_state": "5: LinkUp\\n" if up else "3: Disabled\\n",
                f"{port}/state": "4: ACTIVE\\n" if up else "1: DOWN\\n",
                f"{netdev}/operstate": "up\\n" if up else "down\\n",
            }
        )

    def restore(self) -> None:
        self._undo.close()

    def _shell(self, command: str) -> None:
        self._lab.on_node("bash", "-c", command)


@pytest.fixture
def silicon(lab: Lab) -> Iterator[Silicon]:
    """Every GPU and physical function answers on the bus. Afterwards no device is tainted."""
    silicon = Silicon(lab)
    try:
        functions = lab.machine.functions.values()
        ports = [one.address for one in functions if one.rdma_devices and not one.physical_function]
        silicon.answer(*lab.machine.gpus, *ports)
        yield silicon
    finally:
        silicon.restore()
        eventually(lambda: not taints(lab), f"no device of {lab.node} is tainted", WELL_AGAIN)


def taints(lab: Lab) -> dict[str, str]:
    """Tainted devices of the node, and why."""
    found = {}
    for item in lab.cluster.kubectl_json("get", "resourceslices")["items"]:
        if item["spec"].get("nodeName") == lab.node:
            for device in item["spec"].get("devices") or []:
                for taint in device.get("taints") or []:
                    assert (taint["key"], taint["effect"]) == ("railmate.dev/unhealthy", "NoSchedule")
                    found[device["name"]] = taint["value"]
    return found


def health(workspace: Workspace, name: str) -> list[dict[str, Any]]:
    """What the kubelet says of the devices of the pod's first container: health and message."""
    (status,) = workspace.get("pod", name)["status"]["containerStatuses"]
    return [
        one
        for entry in status.get("allocatedResourcesStatus") or []
        if entry["name"].startswith("claim:")
        for one in entry["resources"]
    ]


def shown(workspace: Workspace, name: str, state: str, seconds: float = SOON) -> str:
    """Wait until the kubelet shows the pod's device in this state; the message it gives."""

    def look() -> list[dict[str, Any]]:
        found = health(workspace, name)
        return found if found and {one["health"] for one in found} == {state} else []

    found = eventually(look, f"device of pod {name} is {state}", seconds)
    return " ".join(str(one.get("message", "")) for one in found)


def halves(lab: Lab, device: str) -> tuple[str, str, str]:
    """Addresses of a pair's GPU, its VF and the VF's physical function."""
    facts = lab.devices[device]
    vf = facts["railmate.dev/nicPciBusID"]
    parent = lab.machine.functions[vf].physical_function
    assert parent is not None
    return facts["railmate.dev/gpuPciBusID"], vf, parent


def test_pod_sees_its_cable_pulled_and_plugged(lab: Lab, workspace: Workspace, silicon: Silicon) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    (device,) = workspace.allocated("one-pair")
    _, vf, pf = halves(lab, device)
    shown(workspace, "one-pair", "Healthy")

    silicon.set_port(pf, up=False)
    message = shown(workspace, "one-pair", "Unhealthy")
    assert f"NIC {vf}" in message
    assert pf in message
    found = eventually(lambda: taints(lab), "the pair is tainted")
    assert found[device] == "nic-link-down"
    assert workspace.get("pod", "one-pair")["status"]["phase"] == "Running"  # NoSchedule: it stays

    silicon.set_port(pf, up=True)
    shown(workspace, "one-pair", "Healthy", WELL_AGAIN)
    eventually(lambda: not taints(lab), "the taint is gone", WELL_AGAIN)


def test_pod_sees_its_gpu_lost_and_new_pods_get_others(
    lab: Lab, workspace: Workspace, silicon: Silicon
) -> None:
    workspace.apply(template("pair", claim_spec("gpu-rdma-pair.railmate.dev")), pod("first", template="pair"))
    workspace.wait_ready("first")
    (device,) = workspace.allocated("first")
    gpu, _, _ = halves(lab, device)
    silicon.fall_off(gpu)
    assert f"GPU {gpu}" in shown(workspace, "first", "Unhealthy")
    assert eventually(lambda: taints(lab), "GPU, pair and node are tainted") == {
        name: "gpu-lost"
        for name, facts in lab.devices.items()
        if facts["railmate.dev/kind"] == "node"
        or gpu in (facts["resource.kubernetes.io/pciBusID"], facts.get("railmate.dev/gpuPciBusID"))
    }

    workspace.delete_pod("first")
    workspace.apply(pod("second", template="pair"))
    workspace.wait_ready("second")
    assert workspace.allocated("second") != [device]  # the first fit, were it not tainted


def test_function_without_its_driver_is_unhealthy(lab: Lab, workspace: Workspace, silicon: Silicon) -> None:
    """It is in a pod, so it stays published; nothing is taken from the pod."""
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    (device,) = workspace.allocated("one-pair")
    gpu, _, _ = halves(lab, device)
    silicon.unbind(gpu)
    assert "no kernel driver" in shown(workspace, "one-pair", "Unhealthy")
    assert eventually(lambda: taints(lab), "the pair is tainted")[device] == "gpu-driver-unbound"
    silicon.bind(gpu)
    shown(workspace, "one-pair", "Healthy", WELL_AGAIN)
