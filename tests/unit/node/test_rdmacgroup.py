"""Which RDMA devices a container is denied, and what people hear where the kernel cannot deny them."""

from __future__ import annotations

from pathlib import Path

import pytest

from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.claims.records import ClaimRef, Entry, PreparedDevice, PreparedNic
from railmate.inventory.model import Inventory, PciFunction, RdmaDevice
from railmate.node.rdmacgroup import RdmaCgroup
from railmate.nri.events import ContainerAdjustment
from railmate.nri.messages import create_container_response
from railmate.publish.model import Offer, OfferedDevice

PF, STORAGE = "0000:0c:00.0", "0000:1d:00.0"
VFS = ("0000:0c:00.1", "0000:0c:00.2", "0000:0c:00.3")
KEY = "railmate.dev/rdma-denied"


def function(address: str, rdma: str, physical: str | None = None) -> PciFunction:
    devices = (RdmaDevice(rdma),)
    return PciFunction(
        address, (address,), 0x020000, 0x15B3, 0x101E, physical_function=physical, rdma_devices=devices
    )


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def cgroup(tmp_path: Path, told: list[str]) -> RdmaCgroup:
    """Of a node that offers the three VFs of one port, and not its storage NIC."""
    one = RdmaCgroup("railmate.dev", tmp_path, told.append)
    vfs = {address: function(address, f"vf{number}", PF) for number, address in enumerate(VFS)}
    functions = {PF: function(PF, "pf"), STORAGE: function(STORAGE, "storage"), **vfs}
    offer = Offer(tuple(OfferedDevice(f"dev-{address}", "rdmaVF", {}, nics=(address,)) for address in VFS))
    one.update(Inventory(functions), offer)
    return one


def claim(*rdma: str) -> Entry:
    nics = tuple(PreparedNic(VFS[0], "net1", rdma=(RdmaDeviceRef(name),)) for name in rdma)
    device = PreparedDevice("main", "node1", "vf", nics=nics)
    return Entry(ClaimRef("uid", "team", "c"), ("pod",), (device,), "boot")


def test_what_other_claims_may_have_is_denied_and_their_physical_function_too(cgroup: RdmaCgroup) -> None:
    assert cgroup.annotations([claim("vf1")], {}) == {KEY: "pf vf0 vf2"}


def test_a_device_that_no_claim_can_have_is_left_to_whoever_uses_it(cgroup: RdmaCgroup) -> None:
    assert "storage" not in cgroup.annotations([claim("vf1")], {})[KEY]


def test_a_container_with_several_claims_keeps_the_devices_of_all(cgroup: RdmaCgroup) -> None:
    assert cgroup.annotations([claim("vf0"), claim("vf2")], {}) == {KEY: "pf vf1"}


def test_a_share_of_a_port_keeps_the_ports_device(cgroup: RdmaCgroup) -> None:
    assert cgroup.annotations([claim("pf")], {}) == {KEY: "vf0 vf1 vf2"}


def looking(*addresses: str) -> Entry:
    """An administrator's claim on devices that others may hold."""
    devices = tuple(
        PreparedDevice("look", "node1", f"dev-{address}", admin_access=True) for address in addresses
    )
    return Entry(ClaimRef("admin", "team", "look"), ("pod",), devices, "boot")


def test_what_an_administrator_looks_at_is_not_denied_beside_a_device_of_its_own(cgroup: RdmaCgroup) -> None:
    assert cgroup.annotations([claim("vf1"), looking(VFS[2])], {}) == {KEY: "pf vf0"}


def test_who_looks_at_one_device_is_denied_the_others(cgroup: RdmaCgroup) -> None:
    assert cgroup.annotations([looking(VFS[0])], {}) == {KEY: "pf vf1 vf2"}
    assert cgroup.annotations([looking("0000:ff:00.0")], {}) == {}, "a device that is gone"


def test_a_container_without_rdma_gets_no_word(cgroup: RdmaCgroup) -> None:
    assert cgroup.annotations([claim()], {}) == {}
    assert cgroup.annotations([], {}) == {}


def test_where_there_is_nothing_to_deny_there_is_no_word(cgroup: RdmaCgroup) -> None:
    assert cgroup.annotations([claim("pf", "vf0", "vf1", "vf2")], {}) == {}


def test_what_the_other_driver_of_an_update_has_said_is_not_said_again(cgroup: RdmaCgroup) -> None:
    said = cgroup.annotations([claim("vf1")], {"io.kubernetes.cri.container-name": "main"})
    assert said == {KEY: "pf vf0 vf2"}
    assert cgroup.annotations([claim("vf1")], said) == {}
    assert cgroup.annotations([claim("vf1")], {KEY: "pf vf0"}) == {}, "it knew the machine before a VF came"


def test_the_runtime_gets_it_as_an_annotation(cgroup: RdmaCgroup) -> None:
    adjustment = ContainerAdjustment(annotations=cgroup.annotations([claim("vf1")], {}))
    assert dict(create_container_response(adjustment).adjust.annotations) == {KEY: "pf vf0 vf2"}


def test_people_hear_once_that_the_gate_found_no_controller(
    cgroup: RdmaCgroup, told: list[str], tmp_path: Path
) -> None:
    cgroup.look()
    assert told == []
    (tmp_path / "rdma-unlimited").touch()
    cgroup.look()
    cgroup.look()
    assert len(told) == 1
    assert "no rdma cgroup controller" in told[0]
