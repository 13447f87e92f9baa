"""InfiniBand VFs: GUID, partition and the kind of the IPoIB interface, from the config to what is asked of the kernel.

There is no InfiniBand hardware to ask, and the kernel makes IPoIB interfaces over nothing else. The messages themselves
are read with another decoder in tests/unit/attach/test_attach_ipoib.py and test_attach_vf.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from claims_netdevs import HOST, World
from claims_world import PF, VFS, claim, config, inventory, ref, result, sandbox, uid, vfio_config, view

import railmate.claims.preparation as preparation
from railmate.attach import functions
from railmate.attach.drivers import DriverBinding
from railmate.attach.model import MoveRequest, NetdevSnapshot, PhysicalPort
from railmate.attach.settings import IpoibSettings, NetdevSettings, VfSettings
from railmate.attach.sriov import stable_guid
from railmate.claims import rebinding
from railmate.claims.allocation import ClaimError
from railmate.claims.plan import NodeView, make_plan
from railmate.claims.records import PreparedNic
from railmate.errors import RailmateError
from railmate.inventory.model import Inventory, Netdev, RdmaDevice
from unit.attach.pci_bus import PciBus

OWN, MINE = "02:00:00:00:00:00:00:01", "02:00:00:00:00:00:00:aa"
PF_GUID = "9803:9b03:0012:3456"


def mac(guid: str) -> str:
    """The hardware address of an IPoIB interface: flags and queue pair, subnet prefix, port GUID (RFC 4391, 9.1.1)."""
    return f"00:00:10:29:fe:80:00:00:00:00:00:00:{guid}"


def infiniband(netdevs: bool = True) -> Inventory:
    """The small node with an InfiniBand NIC."""
    found = inventory()
    changed = dict(found.functions)
    for number, address in enumerate(VFS):
        changed[address] = replace(
            changed[address],
            netdevs=(Netdev(f"vf{number}", mac(OWN), 2044, link_type="infiniband"),) if netdevs else (),
            rdma_devices=(RdmaDevice(f"mlx5_{number}", "InfiniBand", uverbs=(f"uverbs{number}",)),),
        )
    changed[PF] = replace(
        changed[PF],
        netdevs=(Netdev("ibp12s0", link_type="infiniband", mtu=4092),),
        rdma_devices=(RdmaDevice("mlx5_9", "InfiniBand", node_guid=PF_GUID),),
    )
    return replace(found, functions=changed)


def planned(*configs: Any, where: NodeView | None = None, device: str = "vf-0") -> PreparedNic:
    node = where or view(inventory=infiniband())
    return make_plan(claim(1, device, configs=list(configs)), ref(1), node, ()).devices[0].nics[0]


def refusal(*configs: Any, where: NodeView | None = None, device: str = "vf-0") -> str:
    with pytest.raises(ClaimError) as caught:
        planned(*configs, where=where, device=device)
    return str(caught.value)


# --- what is planned
def test_a_guid_is_told_to_the_physical_function_and_the_vf_keeps_its_driver() -> None:
    nic = planned(config(guid="02:00:00:00:00:00:00:AA"))
    assert nic.change is not None
    assert nic.change.wanted == VfSettings(guid=MINE)
    assert (nic.change.driver, nic.change.own_driver) == ("mlx5_core", "mlx5_core")
    assert nic.change.physical == PhysicalPort("ibp12s0", 0)
    assert nic.interface == "net1"
    assert nic.settings.vf is None, "set once, when the claim is prepared"


def test_a_stable_guid_is_the_one_that_provisioning_gives() -> None:
    nic = planned(config(guid="stable"), device="vf-2")
    assert nic.change is not None
    assert nic.change.wanted.guid == stable_guid(PF_GUID, 2)


@pytest.mark.parametrize(
    "configs", [[], [config(guid="keep")], [config("FromClass", guid="stable"), config(guid="keep")]]
)
def test_a_guid_that_is_kept_is_left_alone(configs: list[Any]) -> None:
    assert planned(*configs).change is None


def test_one_guid_is_for_one_nic_and_stable_ones_are_for_several() -> None:
    assert "Use guid: stable" in refusal(config(guid=MINE), device="wide")
    plan = make_plan(
        claim(1, "wide", configs=[config(guid="stable")]), ref(1), view(inventory=infiniband()), ()
    )
    guids = {nic.change.wanted.guid for nic in plan.devices[0].nics if nic.change is not None}
    assert len(guids) == 2


@pytest.mark.parametrize(
    "field", [{"guid": MINE}, {"guid": "stable"}, {"pkey": 0x8001}, {"ipoib": {"umcast": True}}]
)
def test_ethernet_has_nothing_of_it(field: dict[str, Any]) -> None:
    (name,) = field
    said = refusal(config(**field), where=view())
    assert f"{name} is for InfiniBand, and the link of {VFS[0]} is Ethernet" in said
    assert "ResourceClaim team/claim-1: request main" in said


def test_a_partition_is_that_of_a_full_member() -> None:
    nic = planned(config(pkey=0x0001, ipoib={"mode": "connected", "umcast": True}))
    assert nic.settings.ipoib == IpoibSettings(0x8001, "connected", True)
    assert (nic.interface, nic.pod_interface) == ("net1", "net1.8001")
    assert "0x8000 is that of no partition" in refusal(config(pkey=0x8000))


def test_the_physical_functions_mtu_is_not_that_of_a_partition() -> None:
    assert planned().settings.mtu == 4092
    assert planned(config(pkey=0x8001)).settings.mtu is None
    assert planned(config(pkey=0x8001, mtu=2044)).settings.mtu == 2044


# --- exclusive mode: the interface ends when its RDMA device moves
EXCLUSIVE = view(inventory=replace(infiniband(), rdma_netns_mode="exclusive"))


@pytest.mark.parametrize("configs", [[], [config(guid="stable", pkey=0x8001, envHints=True)]])
def test_in_exclusive_mode_the_pod_has_the_rdma_device_and_no_interface(configs: list[Any]) -> None:
    nic = planned(*configs, where=EXCLUSIVE)
    assert (nic.interface, nic.snapshot, [one.name for one in nic.rdma]) == ("", None, ["mlx5_0"])
    assert nic.change is None or not nic.change.netdev


def test_in_exclusive_mode_settings_of_the_interface_are_refused_with_a_way_out() -> None:
    said = refusal(config(mtu=2044, ipoib={"mode": "connected"}), where=EXCLUSIVE)
    assert (
        "ResourceClaim team/claim-1: request main: ipoib, mtu: the node's RDMA devices are in exclusive"
        in said
    )
    assert (
        f"the IPoIB interface of {VFS[0]} ends when its RDMA device moves into the pod. Leave them out"
        in said
    )
    assert "rdma system set netns shared" in said


def test_exclusive_mode_changes_nothing_for_ethernet_and_for_vfio() -> None:
    ethernet = view(inventory=replace(inventory(), rdma_netns_mode="exclusive"))
    assert planned(config(mtu=1400), where=ethernet).interface == "net1"
    passing = planned(vfio_config(), where=EXCLUSIVE)
    assert passing.change is not None
    assert passing.change.netdev, "it is put right when the claim ends"


def test_the_name_of_a_partitions_interface_must_be_short_enough() -> None:
    assert planned(config(pkey=0x8001, interfaceName="infiniband")).pod_interface == "infiniband.8001"
    assert "interfaceName of at most 10" in refusal(config(pkey=0x8001, interfaceName="infiniband0"))


def test_programs_are_told_the_partitions_interface(tmp_path: Path) -> None:
    (tmp_path / "host-local").touch()
    node = view(inventory=infiniband(), cni_dir=tmp_path, node_exists=Path.exists)
    plan = make_plan(
        claim(1, "vf-0", configs=[config(pkey=0x8001, ipam={"type": "host-local"})]), ref(1), node, ()
    )
    (device,) = plan.devices
    assert device.attributes["railmate.dev/interface"] == {"string": "net1.8001"}
    assert device.nics[0].ipam is not None
    assert device.nics[0].ipam.interface == "net1.8001"


def test_an_rdma_device_alone_has_a_partition_but_no_interface() -> None:
    bare = view(inventory=infiniband(netdevs=False))
    nic = planned(config(pkey=0x8001, envHints=True), where=bare)
    assert nic.settings == NetdevSettings(ipoib=IpoibSettings(0x8001))
    assert (nic.interface, nic.pod_interface) == ("", "")
    assert "ipoib: 0000:0c:00.1 has an RDMA device only" in refusal(
        config(ipoib={"mode": "connected"}), where=bare
    )


# --- what is done
@dataclass
class Node:
    world: World
    bus: PciBus
    guid: dict[str, str] = field(default_factory=dict)  # as the physical function has it
    log: list[str] = field(default_factory=list)

    def snapshot(self, name: str, address: str, physical: Any = None, *rest: object) -> NetdevSnapshot:
        found = self.world.netdevs.snapshot(name, address)
        guid = self.guid.get(address, OWN)
        return replace(found, mac=mac(guid), physical=physical, vf=VfSettings(guid=guid))

    def port(self, address: str, pkeys: list[str]) -> None:
        """The port's P_Key table, as sysfs has it."""
        place = self.bus.sysfs / "bus/pci/devices" / address / "infiniband/mlx5_0"
        (place / "ports/1/pkeys").mkdir(parents=True, exist_ok=True)
        (place / "node_guid").write_text(f"{self.guid.get(address, OWN)}\n")
        for index, pkey in enumerate(pkeys):
            (place / "ports/1/pkeys" / str(index)).write_text(f"{pkey}\n")


@pytest.fixture
def node(world: World, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Node:
    bus = PciBus(tmp_path_factory.mktemp("machine"))
    bus.setup("mlx5_core")
    for number, address in enumerate(VFS):
        bus.add(address, "mlx5_core", str(17 + number))
    made = Node(world, bus)

    def netdev_of(address: str) -> str | None:
        place = world.netdevs.where.get(address)
        return place[1] if place is not None and place[0] == HOST else None

    def came(address: str) -> None:
        world.netdevs.where[address] = (HOST, "ib9")
        made.log.append("bound")

    def write(host: object, port: PhysicalPort, wanted: VfSettings) -> None:
        assert bus.driver(VFS[port.vf]) is None, "a driver reads its GUID once"
        made.guid[VFS[port.vf]] = wanted.guid or ""
        made.log.append(f"GUID {wanted.guid}")

    def restore(known: NetdevSnapshot, sides: object) -> list[str]:
        assert known.physical is not None
        assert known.vf is not None
        write(None, known.physical, known.vf)
        return []

    bus.came, bus.went = (
        came,
        lambda address: (world.netdevs.where.pop(address), made.log.append("unbound"))[1],
    )
    monkeypatch.setattr(DriverBinding, "_write", staticmethod(bus.write))
    monkeypatch.setattr(DriverBinding, "_start_unbind", staticmethod(bus.start_unbind))
    monkeypatch.setattr(functions, "with_host", lambda work: work(_Sides()))
    monkeypatch.setattr(functions, "find_on_host", lambda snapshot, sides: None)
    monkeypatch.setattr(functions, "return_all", world.netdevs.return_all)
    monkeypatch.setattr(functions.vf, "write", write)
    monkeypatch.setattr(functions, "restore_vf", restore)
    monkeypatch.setattr(functions, "_NETDEV_PATIENCE", 0.05)
    monkeypatch.setattr(preparation, "snapshot", made.snapshot)
    monkeypatch.setattr(rebinding, "snapshot", made.snapshot)
    world.restart(
        node=view(inventory=infiniband(), sysfs_root=bus.sysfs, dev_root=bus.dev, netdev_of=netdev_of)
    )
    return made


class _Sides:
    host = None


def test_the_vf_is_bound_anew_with_its_guid_and_has_its_own_again_afterwards(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[MoveRequest] = []
    real = node.world.netdevs.attach_all
    monkeypatch.setattr(
        "railmate.claims.attachments.attach_all",
        lambda requests, netns, *alone: (moved.extend(requests), real(requests, netns))[1],
    )
    before = node.bus.state()
    node.world.prepared(1, "vf-0", configs=[config(guid=MINE)])
    assert node.log == ["unbound", f"GUID {MINE}", "bound"]
    assert node.bus.state() == before, "driver and override are its own"
    node.world.state.attach(sandbox())
    (request,) = moved
    assert (request.snapshot.mac, request.snapshot.name) == (mac(MINE), "vf0")
    assert request.settings.vf is None
    node.world.state.unprepare(ref(1))
    assert node.log[3:] == ["unbound", f"GUID {OWN}", "bound"]
    assert node.guid[VFS[0]] == OWN
    assert node.world.clean()


def test_a_vf_that_has_the_guid_already_is_left_bound(node: Node) -> None:
    node.guid[VFS[0]] = MINE
    node.world.prepared(1, "vf-0", configs=[config(guid=MINE)])
    node.world.state.attach(sandbox())
    node.world.state.unprepare(ref(1))
    assert node.log == []
    assert node.guid[VFS[0]] == MINE
    assert node.world.clean()


def test_a_vf_whose_driver_has_not_read_the_guid_yet_is_bound_anew(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its physical function was told of another while the driver had it."""
    real = node.snapshot

    def stale(*arguments: Any) -> NetdevSnapshot:
        return replace(real(*arguments), vf=VfSettings(guid=MINE))

    monkeypatch.setattr(preparation, "snapshot", stale)
    node.world.prepared(1, "vf-0", configs=[config(guid=MINE)])
    assert node.log == ["unbound", f"GUID {MINE}", "bound"]


def test_a_vf_that_was_bound_anew_has_the_nodes_that_it_has_now(node: Node) -> None:
    now = replace(node.world.state._node, char_devices=lambda *_: ("uverbs7",) if node.log else ("uverbs0",))
    node.world.state.update(now)
    node.world.prepared(1, "vf-0", configs=[config(guid=MINE)])
    entry = node.world.ledger.get(uid(1))
    assert entry is not None
    assert [one.path for one in entry.devices[0].nodes] == [
        "/dev/infiniband/rdma_cm",
        "/dev/infiniband/uverbs7",
    ]


def test_a_kill_half_way_is_undone_from_the_ledger(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def writing(path: Path, text: str) -> None:
        if path.name == "drivers_probe":
            raise Killed
        node.bus.write(path, text)

    before = node.bus.state()
    monkeypatch.setattr(DriverBinding, "_write", staticmethod(writing))
    with pytest.raises(Killed):
        node.world.prepared(1, "vf-0", configs=[config(guid=MINE)])
    monkeypatch.setattr(DriverBinding, "_write", staticmethod(node.bus.write))
    node.world.restart(node=node.world.state._node)
    node.world.state.unprepare(ref(1))
    assert node.guid[VFS[0]] == OWN
    assert node.bus.state() == before
    assert node.world.clean()


def test_a_pod_waits_until_the_subnet_manager_has_put_the_port_into_the_partition(node: Node) -> None:
    node.port(VFS[0], ["0xffff", "0x0001", "0x0000"])
    with pytest.raises(ClaimError) as caught:
        node.world.prepared(1, "vf-0", configs=[config(pkey=0x8001)])
    assert "port 1 of mlx5_0 (0000:0c:00.1) is no full member of partition 0x8001" in str(caught.value)
    assert "its partitions are 0xffff, 0x0001. Have the subnet manager put" in str(caught.value)
    node.port(VFS[0], ["0xffff", "0x8001"])
    node.world.state.prepare(ref(1), patience=0)
    node.world.state.attach(sandbox())
    entry = node.world.ledger.get(uid(1))
    assert entry is not None
    assert entry.nics[0].settings.ipoib == IpoibSettings(0x8001)


def test_one_nic_in_a_partition_and_another_without(node: Node) -> None:
    node.port(VFS[0], ["0xffff", "0x8001"])
    partition = config(pkey=0x8001, requests=["a"])
    node.world.prepared(1, result("vf-0", "a"), result("vf-1", "b"), configs=[partition])
    entry = node.world.ledger.get(uid(1))
    assert entry is not None
    assert [nic.pod_interface for nic in entry.nics] == ["net1.8001", "net2"]


def test_where_sysfs_cannot_be_written_a_guid_is_refused(node: Node) -> None:
    (node.bus.sysfs / "bus/pci/drivers_probe").unlink()
    with pytest.raises(RailmateError, match="chart value rebindVFs"):
        node.world.prepared(1, "vf-0", configs=[config(guid=MINE)])
