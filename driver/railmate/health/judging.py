"""From facts to a verdict, and from the verdicts of its parts to a device's health. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from railmate.health.model import HEALTHY, DeviceHealth, Health, Reason, Verdict
from railmate.health.reading import Facts, Kind, NetdevLink, PcieLink, RdmaPort, Target
from railmate.publish.model import OfferedDevice

_NO_ANSWER = 0xFFFF  # what a read gives when nobody answers on the bus (PCIe 6.0, 2.3.2)
_PHYSICALLY_UP = "LinkUp"
_UP = "ACTIVE"


def judge(target: Target, facts: Facts) -> Verdict:
    """The verdict on one function by itself; of several faults the worst. See ``with_parent`` for VFs."""
    if facts.present is None:
        return _unknown("the list of PCI functions cannot be read")
    if not facts.present:
        return _ill(Reason.GONE, "is no longer on the PCI bus. Reseat or replace it, then rescan the bus.")
    if facts.vendor == _NO_ANSWER:
        return _ill(
            Reason.LOST,
            "has fallen off the bus: its configuration space reads all ones. See the kernel's log; reset the "
            "function or restart the node.",
        )
    if facts.lost:
        return _ill(
            Reason.LOST,
            "is lost: NVIDIA's driver cannot reach it any more (NVML). See the kernel's log for Xid errors; reset the "
            "GPU or restart the node.",
        )
    if facts.driver == "":
        return _ill(
            Reason.DRIVER_UNBOUND,
            "has no kernel driver. Bind it again: write its address to the driver's bind file.",
        )
    return worst(_judge_rest(target, facts))


def _judge_rest(target: Target, facts: Facts) -> Iterable[Verdict]:
    if facts.driver is None:
        yield _unknown("whether a driver is bound cannot be read")
    if facts.vendor is None and target.kind is not Kind.VF:
        yield _unknown("its configuration space cannot be read")
    if target.kind is Kind.NIC:
        yield _link(target, facts)
    if facts.pcie is not None:
        yield _pcie(target, facts.pcie)


def _link(target: Target, facts: Facts) -> Verdict:
    """The port of a physical function.

    With RoCE the RDMA port follows the netdev (DOWN, physically Disabled, also while the netdev is only not
    brought up: mlx5_query_port_roce), so the netdev decides first. Where the netdev is in a pod, what the pod does
    with it is the pod's business, and a port that is down then means nothing.
    """
    rdma, netdev = facts.rdma, facts.netdev
    if rdma is not None and rdma.link_layer != "Ethernet":
        return _rdma(rdma)
    if netdev is None:
        if rdma is not None and _rdma(rdma) is HEALTHY:
            return HEALTHY
        return _unknown("its netdev is not on the node, so its link cannot be seen")
    if netdev.up is False:
        return _not_brought_up(target, netdev)
    if netdev.carrier is False:
        return _ill(
            Reason.LINK_DOWN,
            f"{netdev.name} has no carrier. Check cable, transceiver and the switch's port.",
        )
    if rdma is not None:
        return _rdma(rdma)
    return HEALTHY if netdev.carrier else _unknown(f"the carrier of {netdev.name} cannot be read")


def _not_brought_up(target: Target, netdev: NetdevLink) -> Verdict:
    if target.has_vfs or target.shared:
        who = "VFs" if target.has_vfs else "sub-interfaces"
        return _ill(
            Reason.LINK_DOWN,
            f"{netdev.name} is not up, so its {who} have no link. Bring it up: ip link set {netdev.name} up",
        )
    # it is brought up when a pod gets it
    return _unknown(f"{netdev.name} is not up, so its link cannot be seen")


def _rdma(port: RdmaPort) -> Verdict:
    if port.state == _UP and port.physical_state in (None, _PHYSICALLY_UP):
        return HEALTHY
    if port.physical_state == _PHYSICALLY_UP and port.link_layer == "InfiniBand":
        hint = "The cable is up: check that a subnet manager runs."
    else:
        hint = "Check cable, transceiver and the switch's port."
    physical = f" (physically {port.physical_state})" if port.physical_state else ""
    return _ill(Reason.LINK_DOWN, f"port 1 of {port.device} is {port.state}{physical}, not {_UP}. {hint}")


def _pcie(target: Target, link: PcieLink) -> Verdict:
    """A GPU that idles lowers its link's speed to save power, so only its width tells something; a NIC does not."""
    slow = link.speed < link.speed_limit and target.kind is not Kind.GPU
    if link.width >= link.width_limit and not slow:
        return HEALTHY
    return _ill(
        Reason.PCIE_LINK_DEGRADED,
        f"its PCIe link runs at {link.speed:g} GT/s x{link.width}, and both ends can do {link.speed_limit:g} GT/s "
        f"x{link.width_limit}. Reseat the card or the riser.",
    )


def with_parent(own: Verdict, parent: str, verdict: Verdict) -> Verdict:
    """A VF's verdict: its own or, where that is worse, its physical function's."""
    if verdict.health is Health.HEALTHY:
        return own
    named = Verdict(verdict.health, verdict.reason, f"physical function {parent}: {verdict.message}")
    return worst((own, named))


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The first of the worst ones: unhealthy (by reason), then unknown, then healthy. Healthy when there is none."""
    return max(verdicts, key=_rank, default=HEALTHY)


def _rank(verdict: Verdict) -> tuple[int, int]:
    order = (Health.HEALTHY, Health.UNKNOWN, Health.UNHEALTHY)
    return order.index(verdict.health), verdict.reason.severity if verdict.reason else 0


def device_health(device: OfferedDevice, verdicts: Mapping[str, Verdict], checked: float) -> DeviceHealth:
    """A device is what the worst of its parts is; the taint's value and the message name the part.

    ``verdicts`` by address, for all of the device's GPUs and NICs. The message has every part that is not healthy.
    """
    parts = [("gpu", "GPU", address) for address in device.gpus]
    parts += [("nic", "NIC", address) for address in device.nics]
    word, _, address = max(parts, key=lambda part: _rank(verdicts[part[2]]))
    found = verdicts[address]
    told = [
        f"{noun} {address}: {verdicts[address].message}"
        for _, noun, address in parts
        if verdicts[address].health is not Health.HEALTHY
    ]
    return DeviceHealth(
        name=device.name,
        health=found.health,
        message=" ".join(told),
        taint=f"{word}-{found.reason}" if found.reason else None,
        checked=checked,
    )


def _ill(reason: Reason, message: str) -> Verdict:
    return Verdict(Health.UNHEALTHY, reason, message)


def _unknown(message: str) -> Verdict:
    return Verdict(Health.UNKNOWN, None, message)
