"""VFs made by the driver on a real NIC, from the chart's value (see conftest): how many, which MACs, and when not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from e2e.lab import eventually
from e2e.vnode.lab import PATIENCE, PROVISIONED, PROVISIONING, VnodeLab
from harness.vnode_machine import Settings
from railmate.attach.sriov import stable_mac

_RULE = PROVISIONING["rules"][0]
_NETNS = "vnode-test-holder"


@dataclass(frozen=True)
class Nic:
    """The physical function that has a rule."""

    vlab: VnodeLab
    address: str

    def shell(self, command: str) -> str:
        return self.vlab.guest.run("sh", "-c", f"cd /sys/bus/pci/devices/{self.address}; {command}")

    def vfs(self) -> int:
        return int(self.shell("cat sriov_numvfs"))

    @contextmanager
    def as_the_nodes_way_out(self) -> Iterator[None]:
        """Within it a default route of the node leads over the NIC: the driver must let it alone."""
        route = f"default via 192.0.2.1 dev {PROVISIONED} onlink metric 4000"
        self.shell(f"ip route add {route}")
        try:
            yield
        finally:
            self.shell(f"ip route delete {route}; echo change > uevent")  # of routes the driver hears nothing

    def links(self) -> list[tuple[str, int]]:
        """MAC and MTU of the VFs' netdevs, in the order of the VFs."""
        look = "for vf in virtfn?; do cat $vf/net/*/address $vf/net/*/mtu 2> /dev/null; done; true"
        listed = self.shell(look).split()
        return [(mac, int(mtu)) for mac, mtu in zip(listed[::2], listed[1::2], strict=False)]

    def told(self, sentence: str) -> list[str]:
        """Events of the node about VFs that are not made, with the sentence and about this NIC."""
        options = ("-n", "default", "get", "events", "--field-selector", "reason=VfsNotProvisioned")
        listed = json.loads(self.vlab.kubectl(*options, "-o", "json"))["items"]
        messages = [one["message"] for one in listed]
        return [one for one in messages if one.startswith(self.address) and sentence in one]

    def await_withdrawn(self) -> None:
        """The driver has looked: nothing of the NIC is offered."""
        bus = f'"{self.address[:8]}'
        eventually(lambda: bus not in json.dumps(self.vlab.published()), f"no VF at {bus} offered", PATIENCE)


@pytest.fixture(scope="module")
def nic(vlab: VnodeLab) -> Iterator[Nic]:
    """Afterwards the node is as it was, and so is what it offers. All is done while the driver leaves the NIC alone."""
    before, offered = vlab.state(), vlab.published()
    found = Nic(vlab, vlab.switches[3].nic)
    yield found
    with found.as_the_nodes_way_out():
        vlab.guest.execute(["ip", "netns", "delete", _NETNS])
        found.shell("echo 0 > sriov_numvfs")
        found.await_withdrawn()
        vlab.guest.run("/usr/lib/vnode/devices", str(Settings().vfs), timeout=PATIENCE)
    vlab.await_state(before)
    eventually(lambda: vlab.published() == offered, "the node offers what it offered", PATIENCE)


def test_a_nic_that_lost_its_vfs_gets_them_back_with_macs_that_stay_and_its_mtu(nic: Nic) -> None:
    """The same MACs at every boot: they follow from the physical function's."""
    nic.shell("echo 0 > sriov_numvfs")
    physical = nic.shell(f"cat net/{PROVISIONED}/address").strip()
    expected = [(stable_mac(physical, index), _RULE["mtu"]) for index in range(_RULE["vfs"])]
    eventually(lambda: nic.links() == expected, f"MACs and MTUs as in {expected}", PATIENCE)
    assert nic.vfs() == _RULE["vfs"]
    assert int(nic.shell(f"cat net/{PROVISIONED}/mtu")) == _RULE["mtu"]


def test_neither_the_nodes_own_way_out_nor_a_nic_with_a_vf_in_use_is_touched(
    nic: Nic, vlab: VnodeLab
) -> None:
    """The last test of this module: it leaves the VF where it is."""
    with nic.as_the_nodes_way_out():
        nic.shell("echo 0 > sriov_numvfs")
        nic.await_withdrawn()
        eventually(lambda: nic.told("it carries the node's own traffic"), "an Event of the node", PATIENCE)
        assert nic.vfs() == 0
        vlab.guest.run("ip", "netns", "add", _NETNS)
        nic.shell(f"echo 2 > sriov_numvfs; ip link set $(ls virtfn0/net) netns {_NETNS}")
    (told,) = eventually(lambda: nic.told("is in use"), "an Event of the node", PATIENCE)
    assert f"it has 2 VFs, {_RULE['vfs']} are wanted, and {vlab.switches[3].vf(0)} is in use" in told
    assert nic.vfs() == 2
