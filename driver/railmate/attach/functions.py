"""A PCI function that is changed while a claim holds it: bound to vfio-pci, or to its own driver with another GUID.

A driver reads a GUID once, when it takes the function over, so both are done in the same way: unbind, tell the physical
function, bind. That takes up to seconds and ends the netdev, which comes anew afterwards, so it is done when a claim is
prepared and never in the runtime's hook.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from railmate.attach import rdmalink, rdmasoft, vf
from railmate.attach.drivers import DriverBinding, arrival
from railmate.attach.errors import AttachError
from railmate.attach.home import find_on_host, restore_vf
from railmate.attach.links import attempt
from railmate.attach.model import NetdevReturn, NetdevSnapshot, PhysicalPort, ReturnRequest, ReturnState
from railmate.attach.namespaces import Sides, with_host
from railmate.attach.netdev import return_all
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.attach.settings import NetdevSettings, VfSettings
from railmate.attach.vf import NOTHING
from railmate.attach.vfio import DRIVER as VFIO

#: Seconds that a driver may take to make its netdev after it has taken a function over.
_NETDEV_PATIENCE = 15.0


@dataclass(frozen=True, slots=True)
class FunctionChange:
    """``driver`` is what the function is bound to for the claim, ``own_driver`` what it returns to, ``override`` what
    an administrator had named for it ("" for none). ``wanted`` is told to its physical function, which kept ``before``.

    ``snapshot`` is its netdev before the change, where it is to have one (``netdev``); ``rdma`` are its RDMA devices.
    ``made``: all of it is done. Without, it is on its way in one direction or the other. ``node``: its VFIO device
    node below /dev, as long as it is there.
    """

    driver: str
    own_driver: str
    wanted: VfSettings = NOTHING
    netdev: bool = False
    rdma: tuple[RdmaDeviceRef, ...] = ()
    physical: PhysicalPort | None = None
    before: VfSettings | None = None
    override: str = ""
    snapshot: NetdevSnapshot | None = None
    made: bool = False
    node: str = ""

    @property
    def passes_through(self) -> bool:
        """Whether a program in user space gets the function, and there is no netdev to give."""
        return self.driver == VFIO


def is_so(change: FunctionChange, kept: VfSettings | None, guid: str | None) -> bool:
    """Whether the function is already what it is to be. ``kept`` is what its physical function keeps of it, ``guid``
    what it has itself: its driver may have read it before that was set."""
    wanted = change.wanted.guid
    if change.driver != change.own_driver or wanted is None or kept is None or guid is None:
        return False
    return kept.guid == wanted and guid.replace(":", "") == wanted.replace(":", "")


def kept(change: FunctionChange) -> VfSettings | None:
    """What the physical function keeps of the VF now. Raises AttachError."""
    port = change.physical
    return with_host(lambda sides: vf.read(sides.host, port)) if port is not None else None


def make(address: str, change: FunctionChange, sysfs_root: Path) -> None:
    """Make the change. May be repeated; raises AttachError, and the function is as it was then, as far as it can be."""
    binding = DriverBinding(sysfs_root, address)
    try:
        _make(binding, change)
    except AttachError as error:
        try:
            undo(address, change, sysfs_root)
        except AttachError as problem:
            raise AttachError(f"{error}; then {problem}") from None
        raise


def _make(binding: DriverBinding, change: FunctionChange) -> None:
    snapshot = change.snapshot
    if snapshot is not None:
        with_host(lambda sides: rdmasoft.end(snapshot.soft_rdma, snapshot.name, sides))
    with arrival(binding, _NETDEV_PATIENCE) as arrived:
        binding.rebind(change.driver, lambda: _tell(change))
        if change.passes_through:
            return
        binding.set_override(change.override)
        if not change.netdev or snapshot is None:
            return
        if not arrived():
            raise AttachError(f"{change.driver} has made no netdev for {binding.address} again")
    # the name and so on; not the physical function's part, and not a MAC that holds the GUID
    return_all([ReturnRequest(replace(snapshot, mac=_mac_now(snapshot), physical=None, vf=None))], None)


def _tell(change: FunctionChange) -> None:
    port, before = change.physical, change.before
    if change.wanted == NOTHING:
        return
    if port is None or before is None:
        raise AttachError("there is no physical function through which it could be set")
    with_host(lambda sides: vf.write(sides.host, port, vf.filled(change.wanted, before)))


def _mac_now(snapshot: NetdevSnapshot) -> str:
    what = f"{snapshot} cannot be looked for after its driver has made it anew; delete the pod to try again"
    with attempt(what):
        link = with_host(lambda sides: find_on_host(snapshot, sides))
    return link.mac if link is not None else snapshot.mac


def undo(address: str, change: FunctionChange, sysfs_root: Path) -> NetdevReturn | None:
    """Bind the function to its own driver, and give it and its netdev back all that it had. May be repeated, and after
    any step of `make`. What became of the netdev, and of the RDMA devices' names; None where there was none, and no
    problem.

    Raises AttachError when the function is still not its own driver's.
    """
    binding = DriverBinding(sysfs_root, address)
    if not binding.present:
        return None  # its physical function has made its VFs anew, or it was taken out
    snapshot = change.snapshot
    with arrival(binding, _NETDEV_PATIENCE) as arrived:
        if binding.driver != change.own_driver or not change.passes_through:
            binding.rebind(change.own_driver, lambda: _restore_vf(address, change))
        binding.set_override(change.override)
        if snapshot is None:
            wrong = with_host(lambda sides: _name_rdma(change.rdma, sides))
            return NetdevReturn(address, ReturnState.ALREADY_HOME, None, tuple(wrong)) if wrong else None
        arrived()
    request = ReturnRequest(snapshot, None, NetdevSettings(vf=change.wanted))
    (result,) = return_all([request], None)
    problems = with_host(lambda sides: _name_rdma(change.rdma, sides))
    if result.state is ReturnState.FAILED:
        raise AttachError(f"netdev {snapshot.name} of {address} cannot be put right: {result.problems[0]}")
    return replace(result, problems=(*result.problems, *problems))


def _restore_vf(address: str, change: FunctionChange) -> None:
    """What cannot be restored is found again, and told, when the netdev is put right."""
    known = NetdevSnapshot(address, "", "", 0, False, physical=change.physical, vf=change.before)
    with_host(lambda sides: restore_vf(known, sides))


def _name_rdma(devices: tuple[RdmaDeviceRef, ...], sides: Sides) -> list[str]:
    """The kernel numbers RDMA devices as they come. They are known by their GUIDs."""
    hard = [device for device in devices if device.soft is None and device.node_guid]
    if not hard:
        return []
    try:
        with rdmalink.open_sides(sides) as rdma:
            for device in hard if rdma is not None else ():
                assert rdma is not None
                links = rdma.host.links()
                link = next((one for one in links if one.node_guid == device.node_guid), None)
                if link is not None and link.name != device.name:
                    with rdmalink.attempt(f"{device}, which is {link.name} now, cannot be named again"):
                        rdmalink.rename(link, rdma.host, device.name)
    except AttachError as error:
        return [str(error)]
    return []
