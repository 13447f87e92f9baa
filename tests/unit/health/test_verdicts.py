"""What sysfs shows of a broken function, and what is said about it: reading and judging together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from railmate.health.judging import device_health, judge, with_parent, worst
from railmate.health.model import HEALTHY, Health, Reason, Verdict
from railmate.health.reading import Facts, Kind, NetdevLink, PcieLink, RdmaPort, Sysfs, Target, read, targets
from railmate.publish.model import Offer, OfferedDevice
from unit.health.health_tree import Tree


def verdict(tree: Tree, address: str, *, pcie_link: bool = True) -> Verdict:
    sysfs = Sysfs(tree.sys)
    target = targets(tree.offer, tree.inventory)[address]
    return judge(target, read(sysfs, target, sysfs.functions(), pcie_link=pcie_link))


def test_everything_of_a_sound_machine_is_healthy(tree: Tree) -> None:
    found = targets(tree.offer, tree.inventory)
    assert {target.kind for target in found.values()} == set(Kind)
    for address in found:
        assert verdict(tree, address) == HEALTHY, address


def test_physical_functions_are_looked_at_for_their_vfs(tree: Tree) -> None:
    found = targets(tree.offer, tree.inventory)
    assert found[tree.vf].parent == tree.pf
    assert found[tree.pf].kind is Kind.NIC
    assert found[tree.pf].has_vfs
    assert tree.pf not in {nic for device in tree.offer.devices for nic in device.nics}


def test_of_hardware_that_a_pod_holds_and_nobody_knows_any_more_it_is_told_that_it_is_gone(
    tree: Tree,
) -> None:
    """A driver that starts while a held GPU is off the bus must start all the same."""
    held = OfferedDevice("held", "held", {}, gpus=("0000:f0:00.0",), nics=("0000:f1:00.0", tree.vf))
    functions = {address: one for address, one in tree.inventory.functions.items() if address != tree.pf}
    found = targets(Offer((held,)), replace(tree.inventory, functions=functions))
    assert found.keys() == {"0000:f0:00.0", "0000:f1:00.0", tree.vf}
    sysfs = Sysfs(tree.sys)
    for address in ("0000:f0:00.0", "0000:f1:00.0"):
        facts = read(sysfs, found[address], sysfs.functions(), pcie_link=True)
        assert judge(found[address], facts).reason is Reason.GONE


def unbind(tree: Tree, address: str) -> None:
    (tree.function(address) / "driver").unlink()


def remove(tree: Tree, address: str) -> None:
    tree.function(address).unlink()


CASES: list[tuple[str, str, Callable[[Tree, str], object], Reason, str]] = [
    ("gpu", "lost", lambda t, a: t.lose(a), Reason.LOST, "all ones"),
    ("gpu", "unbound", unbind, Reason.DRIVER_UNBOUND, "bind"),
    ("gpu", "gone", remove, Reason.GONE, "no longer on the PCI bus"),
    ("gpu", "narrow", lambda t, a: t.set_link(a, "16.0 GT/s PCIe", "8"), Reason.PCIE_LINK_DEGRADED, "x8"),
    ("pf", "lost", lambda t, a: t.lose(a), Reason.LOST, "all ones"),
    ("pf", "unbound", unbind, Reason.DRIVER_UNBOUND, "bind"),
    ("pf", "gone", remove, Reason.GONE, "no longer on the PCI bus"),
    ("pf", "slow", lambda t, a: t.set_link(a, "8.0 GT/s PCIe", "16"), Reason.PCIE_LINK_DEGRADED, "8 GT/s"),
    ("pf", "cable", lambda t, a: t.set_carrier(a, False), Reason.LINK_DOWN, "no carrier"),
    ("pf", "down", lambda t, a: t.set_netdev(a, up=False, carrier=False), Reason.LINK_DOWN, "ip link set"),
    ("pf", "port", lambda t, a: t.set_port(a, "1: DOWN", "3: Disabled"), Reason.LINK_DOWN, "DOWN"),
    ("pf", "armed", lambda t, a: t.set_port(a, "3: ARMED", "5: LinkUp"), Reason.LINK_DOWN, "ARMED"),
    ("pf", "polling", lambda t, a: t.set_port(a, "4: ACTIVE", "2: Polling"), Reason.LINK_DOWN, "Polling"),
    ("vf", "unbound", unbind, Reason.DRIVER_UNBOUND, "bind"),
    ("vf", "gone", remove, Reason.GONE, "no longer on the PCI bus"),
]


@pytest.mark.parametrize(
    ("who", "harm", "reason", "words"),
    [pytest.param(who, harm, reason, words, id=f"{who}-{name}") for who, name, harm, reason, words in CASES],
)
def test_broken_function_is_unhealthy_for_its_reason(
    tree: Tree, who: str, harm: Callable[[Tree, str], object], reason: Reason, words: str
) -> None:
    address = getattr(tree, who)
    harm(tree, address)
    found = verdict(tree, address)
    assert (found.health, found.reason) == (Health.UNHEALTHY, reason)
    assert words in found.message


def test_what_a_pod_does_with_a_vfs_netdev_is_its_own_business(tree: Tree) -> None:
    tree.set_port(tree.vf, "1: DOWN", "3: Disabled")
    tree.set_netdev(tree.vf, up=False, carrier=False)
    assert verdict(tree, tree.vf) == HEALTHY
    shutil.rmtree(tree.function(tree.vf) / "net")
    shutil.rmtree(tree.function(tree.vf) / "infiniband")
    assert verdict(tree, tree.vf) == HEALTHY


def test_vfs_own_configuration_space_says_nothing(tree: Tree) -> None:
    """A VF's vendor id reads ffff on real hardware."""
    (tree.function(tree.vf) / "config").write_bytes(b"\xff" * 64)
    assert verdict(tree, tree.vf) == HEALTHY


@pytest.mark.parametrize("who", ["gpu", "pf"])
def test_unreadable_configuration_space_is_unknown_not_healthy(tree: Tree, who: str) -> None:
    (tree.function(getattr(tree, who)) / "config").unlink()
    found = verdict(tree, getattr(tree, who))
    assert found.health is Health.UNKNOWN
    assert "configuration space" in found.message


def test_missing_list_of_functions_is_unknown_not_gone(tree: Tree) -> None:
    shutil.rmtree(tree.sys / "bus")
    for who in (tree.gpu, tree.pf, tree.vf):
        assert verdict(tree, who).health is Health.UNKNOWN


def test_unreadable_carrier_and_port_are_unknown(tree: Tree) -> None:
    for name in ("carrier", "operstate", "flags"):
        (tree.netdev(tree.pf) / name).unlink()
    shutil.rmtree(tree.port(tree.pf))
    assert verdict(tree, tree.pf).health is Health.UNKNOWN


def test_port_that_is_down_tells_nothing_while_its_netdev_is_in_a_pod(tree: Tree) -> None:
    """A whole NIC in a pod, in shared RDMA mode: its port stays visible and follows the netdev."""
    shutil.rmtree(tree.function(tree.pf) / "net")
    assert verdict(tree, tree.pf) == HEALTHY
    tree.set_port(tree.pf, "1: DOWN", "3: Disabled")
    assert verdict(tree, tree.pf).health is Health.UNKNOWN


def test_whole_nic_that_is_not_brought_up_is_unknown() -> None:
    """It is brought up when a pod gets it; only VFs need their physical function up."""
    netdev = NetdevLink("eth0", up=False, carrier=None)
    facts = Facts(present=True, vendor=0x15B3, driver="mlx5_core", netdev=netdev)
    whole = Target("0000:01:00.0", Kind.NIC)
    assert judge(whole, facts).health is Health.UNKNOWN


def test_a_shared_nic_that_is_not_brought_up_has_no_link_for_its_sub_interfaces() -> None:
    """It stays on the node, so nobody brings it up when a pod gets a share."""
    netdev = NetdevLink("eth0", up=False, carrier=None)
    facts = Facts(present=True, vendor=0x15B3, driver="mlx5_core", netdev=netdev)
    found = judge(Target("0000:01:00.0", Kind.NIC, shared=True), facts)
    assert found.reason is Reason.LINK_DOWN
    assert "its sub-interfaces have no link" in found.message


def test_a_function_is_looked_at_as_shared_when_it_is_offered_so(tree: Tree) -> None:
    shared = OfferedDevice("shared", "rdma-shared", {}, nics=(tree.pf,), sub_interfaces=4)
    offer = Offer((*tree.offer.devices, shared))
    assert targets(offer, tree.inventory)[tree.pf].shared
    assert not targets(tree.offer, tree.inventory)[tree.pf].shared


@pytest.mark.parametrize("layer", ["InfiniBand", "Unspecified"])
def test_infiniband_port_stands_by_itself(layer: str) -> None:
    """No netdev is needed, and one that is down says nothing: IPoIB is optional."""
    target = Target("0000:01:00.0", Kind.NIC)
    for netdev in (None, NetdevLink("ib0", up=False, carrier=None)):
        sound = Facts(True, 0x15B3, "mlx5_core", None, RdmaPort("mlx5_0", "ACTIVE", "LinkUp", layer), netdev)
        assert judge(target, sound) == HEALTHY
        bad = Facts(True, 0x15B3, "mlx5_core", None, RdmaPort("mlx5_0", "INIT", "LinkUp", layer), netdev)
        assert judge(target, bad).reason is Reason.LINK_DOWN
        assert ("subnet manager" in judge(target, bad).message) == (layer == "InfiniBand")


def test_gpu_that_saves_power_is_healthy(tree: Tree) -> None:
    """An idle GPU lowers its link's speed."""
    tree.set_link(tree.gpu, "2.5 GT/s PCIe", "16")
    assert verdict(tree, tree.gpu) == HEALTHY


def test_card_in_a_slot_that_can_do_less_is_healthy(tree: Tree) -> None:
    port = tree.function(tree.bridge(tree.pf))
    (port / "max_link_speed").write_text("8.0 GT/s PCIe\n")
    (port / "max_link_width").write_text("8\n")
    tree.set_link(tree.pf, "8.0 GT/s PCIe", "8")
    assert verdict(tree, tree.pf) == HEALTHY


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("max_link_speed", "Unknown"),
        ("max_link_width", "255"),
        ("max_link_width", "0"),
        ("current_link_speed", "Unknown"),
        ("current_link_width", "0"),
        ("current_link_width", "63"),
        ("max_link_width", "x"),
    ],
)
def test_pcie_link_that_makes_no_sense_is_not_judged(tree: Tree, name: str, text: str) -> None:
    tree.set_link(tree.pf, "2.5 GT/s PCIe", "1")
    assert verdict(tree, tree.pf).reason is Reason.PCIE_LINK_DEGRADED
    (tree.function(tree.pf) / name).write_text(f"{text}\n")
    assert verdict(tree, tree.pf) == HEALTHY


def test_pcie_link_is_not_judged_in_a_virtual_machine(tree: Tree) -> None:
    tree.set_link(tree.pf, "2.5 GT/s PCIe", "1")
    assert verdict(tree, tree.pf, pcie_link=False) == HEALTHY


def test_uplink_is_found_among_its_vfs_representors(tree: Tree) -> None:
    representor = tree.function(tree.pf) / "net" / "aaa0"
    shutil.copytree(tree.netdev(tree.pf), representor, symlinks=True)
    (representor / "carrier").write_text("0\n")
    assert verdict(tree, tree.pf) == HEALTHY


def test_soft_rdma_device_is_found_by_its_class(tree: Tree) -> None:
    name = tree.inventory.functions[tree.pf].rdma_devices[0].name
    place = tree.function(tree.pf) / "infiniband"
    (tree.sys / "class/infiniband" / name).unlink()
    shutil.move(place / name, tree.sys / "class/infiniband" / name)
    place.rmdir()
    assert verdict(tree, tree.pf) == HEALTHY
    (tree.sys / "class/infiniband" / name / "ports/1/state").write_text("1: DOWN\n")
    assert verdict(tree, tree.pf).reason is Reason.LINK_DOWN


def test_tree_without_flags_and_carrier_is_judged_by_operstate(tree: Tree) -> None:
    for name in ("carrier", "flags"):
        (tree.netdev(tree.pf) / name).unlink()
    assert verdict(tree, tree.pf) == HEALTHY
    (tree.netdev(tree.pf) / "operstate").write_text("down\n")
    assert verdict(tree, tree.pf).reason is Reason.LINK_DOWN


def test_reading_garbage_raises_nothing(tree: Tree) -> None:
    for who in (tree.gpu, tree.pf, tree.vf):
        for path in [*tree.function(who).resolve().rglob("*")]:
            if path.is_file() and not path.is_symlink():
                path.write_bytes(b"\x00\xfe garbage \n\n")
        assert verdict(tree, who).health in Health


def test_link_downs_are_the_kernels_count(tree: Tree) -> None:
    sysfs, target = Sysfs(tree.sys), targets(tree.offer, tree.inventory)[tree.pf]
    tree.set_carrier(tree.pf, False)
    tree.set_carrier(tree.pf, True)
    assert read(sysfs, target, sysfs.functions(), pcie_link=False).link_downs == 1
    shutil.rmtree(tree.function(tree.pf) / "net")
    counters = tree.port(tree.pf) / "counters"
    counters.mkdir()
    (counters / "link_downed").write_text("7\n")
    assert read(sysfs, target, sysfs.functions(), pcie_link=False).link_downs == 7


# --- several verdicts
UNKNOWN = Verdict(Health.UNKNOWN, None, "cannot be seen.")
DOWN = Verdict(Health.UNHEALTHY, Reason.LINK_DOWN, "has no carrier.")
LOST = Verdict(Health.UNHEALTHY, Reason.LOST, "has fallen off the bus.")


def test_worst_is_unhealthy_by_severity_then_unknown() -> None:
    assert worst([]) == HEALTHY
    assert worst([HEALTHY, UNKNOWN]) == UNKNOWN
    assert worst([DOWN, UNKNOWN, HEALTHY]) == DOWN
    assert worst([DOWN, LOST]) == LOST


def test_vf_is_as_ill_as_its_physical_function() -> None:
    assert with_parent(HEALTHY, "0000:01:00.0", HEALTHY) == HEALTHY
    found = with_parent(HEALTHY, "0000:01:00.0", DOWN)
    assert (found.health, found.reason) == (DOWN.health, DOWN.reason)
    assert found.message == "physical function 0000:01:00.0: has no carrier."
    assert with_parent(LOST, "0000:01:00.0", DOWN) == LOST


@pytest.mark.parametrize(
    ("gpu", "nic", "health", "taint", "message"),
    [
        (HEALTHY, HEALTHY, Health.HEALTHY, None, ""),
        (LOST, HEALTHY, Health.UNHEALTHY, "gpu-lost", "GPU g: has fallen off the bus."),
        (HEALTHY, DOWN, Health.UNHEALTHY, "nic-link-down", "NIC n: has no carrier."),
        (LOST, DOWN, Health.UNHEALTHY, "gpu-lost", "GPU g: has fallen off the bus. NIC n: has no carrier."),
        (UNKNOWN, DOWN, Health.UNHEALTHY, "nic-link-down", "GPU g: cannot be seen. NIC n: has no carrier."),
        (UNKNOWN, HEALTHY, Health.UNKNOWN, None, "GPU g: cannot be seen."),
    ],
)
def test_pair_is_what_its_worst_half_is(
    gpu: Verdict, nic: Verdict, health: Health, taint: str | None, message: str
) -> None:
    pair = OfferedDevice("pair-0", "pair", {}, gpus=("g",), nics=("n",))
    found = device_health(pair, {"g": gpu, "n": nic}, checked=12.0)
    assert (found.name, found.health, found.taint, found.message) == ("pair-0", health, taint, message)


def test_every_taint_is_a_labels_value() -> None:
    import re

    for reason in Reason:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", f"gpu-{reason}")


def test_another_sysfs_root_is_honoured(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "elsewhere")
    assert Sysfs(tree.sys).functions() == frozenset(tree.inventory.functions)


def test_pcie_speed_counts_for_nics_only() -> None:
    slow = Facts(present=True, vendor=1, driver="x", pcie=PcieLink(2.5, 16, 32.0, 16))
    assert judge(Target("g", Kind.GPU), slow) == HEALTHY
