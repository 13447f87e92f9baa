"""Hardware that comes and goes while the driver runs: published at once, and never taken from a pod without a word.

The tree of the simulated machine changes; the word of it is a real uevent of the kernel.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.lab import Lab, Workspace, eventually
from e2e.test_health import WELL_AGAIN, taints
from harness.simnode import STATE

#: Seconds from the uevent to the slices: the driver waits until it is quiet for half a second.
AT_ONCE = 15.0


class Hardware:
    """A function that can be pulled and put back."""

    def __init__(self, lab: Lab, address: str) -> None:
        self._lab = lab
        self._place = f"{STATE}/sys/bus/pci/devices/{address}"
        self._pf = lab.machine.functions[address].physical_function
        self._listed = f"{STATE}/sys/bus/pci/devices/{self._pf}"
        self._address = address

    def pull(self) -> None:
        """The function leaves the bus, and its physical function no longer lists it."""
        self._shell(f"mv -T {self._place} {STATE}/pulled")
        if self._pf:
            self._shell(
                f'cd {self._listed}/; for link in virtfn*; do case $(readlink "$link") in *{self._address}) '
                f'echo "$link $(readlink "$link")" > {STATE}/listed; rm "$link";; esac; done'
            )
        self._uevent()

    def put_back(self) -> None:
        self._shell(
            f"if [ -e {STATE}/pulled ] || [ -L {STATE}/pulled ]; then mv -T {STATE}/pulled {self._place}; fi; "
            f"if [ -e {STATE}/listed ]; then read -r link target < {STATE}/listed; "
            f"ln -s $target {self._listed}/$link; rm {STATE}/listed; fi"
        )
        self._uevent()

    @staticmethod
    def _uevent() -> None:
        """Of some function of the real machine; the kernel tells every network namespace of it."""
        (one, *_) = Path("/sys/bus/pci/devices").iterdir()
        (one / "uevent").write_text("change")

    def _shell(self, command: str) -> None:
        self._lab.on_node("bash", "-ec", command)


@contextlib.contextmanager
def pulled(lab: Lab, address: str) -> Iterator[Hardware]:
    hardware = Hardware(lab, address)
    try:
        hardware.pull()
        yield hardware
    finally:
        hardware.put_back()


def published(lab: Lab) -> dict[str, str]:
    """The node's devices, and the address of each but the whole node."""
    return {
        device["name"]: device["attributes"]["resource.kubernetes.io/pciBusID"]["string"]
        for item in lab.cluster.kubectl_json("get", "resourceslices")["items"]
        if item["spec"].get("nodeName") == lab.node
        for device in item["spec"].get("devices") or []
        if "resource.kubernetes.io/pciBusID" in device["attributes"]
    }


@pytest.fixture
def before(lab: Lab) -> Iterator[dict[str, str]]:
    """What is published, before and after."""
    found = published(lab)
    yield found
    eventually(lambda: published(lab) == found, "what was published before", 90)
    eventually(lambda: not taints(lab), f"no device of {lab.node} is tainted", WELL_AGAIN)


def test_a_vf_that_is_gone_is_no_longer_offered_and_offered_again_when_it_is_back(
    lab: Lab, before: dict[str, str]
) -> None:
    name, address = next((n, a) for n, a in before.items() if n.startswith("vf-"))
    with pulled(lab, address) as hardware:
        began = time.monotonic()
        eventually(lambda: name not in published(lab), f"{name} is no longer offered", AT_ONCE)
        rest = {other: at for other, at in before.items() if at != address}
        assert rest.items() <= published(lab).items()
        hardware.put_back()
        eventually(lambda: published(lab) == before, f"{name} is offered again", AT_ONCE)
        assert time.monotonic() - began < 2 * AT_ONCE


def test_a_gpu_that_is_gone_is_no_longer_offered_nor_its_pair_and_both_are_when_it_is_back(
    lab: Lab, before: dict[str, str]
) -> None:
    address = next(at for name, at in before.items() if name.startswith("gpu-"))
    gone = {name for name, at in before.items() if at == address}
    vfs = {name: at for name, at in before.items() if name.startswith("vf-")}
    assert len(gone) >= 2, "the GPU and its pair"
    with pulled(lab, address) as hardware:
        eventually(lambda: gone.isdisjoint(published(lab)), "what has the GPU is no longer offered", AT_ONCE)
        assert vfs.items() <= published(lab).items(), "its NIC alone still is"
        hardware.put_back()
        eventually(lambda: published(lab) == before, "all are offered again", AT_ONCE)


def test_a_vf_that_a_pod_holds_stays_published_and_its_loss_is_told(
    lab: Lab, workspace: Workspace, before: dict[str, str]
) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    (device,) = workspace.allocated("one-pair")
    vf = lab.devices[device]["railmate.dev/nicPciBusID"]
    claim = workspace.claim_of("one-pair")["metadata"]["name"]

    def told() -> list[str]:
        selector = f"involvedObject.name={claim},reason=DeviceGone"
        events = json.loads(workspace.kubectl("get", "events", "--field-selector", selector, "-o", "json"))
        return [event["message"] for event in events["items"]]

    with pulled(lab, vf):
        (message,) = eventually(told, "an Event on the claim", AT_ONCE)
        assert vf in message
        assert published(lab) == before
    assert workspace.get("pod", "one-pair")["status"]["phase"] == "Running"
    workspace.delete_pod("one-pair")
    lab.wait_home()
