"""From an allocated claim to what is to be done for it. A pure function; nothing is touched here.

Source of the claim's shape: k8s.io/api resource/v1 (AllocationResult, DeviceAllocationConfiguration).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from railmate.attach.ipam import IpamRequest
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.attach.settings import NetdevSettings
from railmate.claims import configs, functionplan, nicplan
from railmate.claims.allocation import (
    ClaimError,
    allocated,
    check_claim,
    pod_claim_name,
    pod_name,
    reserved_pods,
)
from railmate.claims.configs import ClaimConfig
from railmate.claims.devicenodes import DeviceNodes
from railmate.claims.interfaces import InterfaceNames
from railmate.claims.nodeview import NodeView
from railmate.claims.records import ClaimRef, PreparedDevice, PreparedNic
from railmate.claims.shares import share_of
from railmate.errors import RailmateError
from railmate.inventory.model import PciFunction
from railmate.publish.model import OfferedDevice
from railmate.publish.slices import api_attribute
from railmate_api import attributes as names
from railmate_api.config import Config, ConfigError, NetdevConfig, RdmaSharedConfig, RdmaVfConfig

__all__ = ["NodeView", "Plan", "make_plan"]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # DNS label, RFC 1123


@dataclass(frozen=True, slots=True)
class Plan:
    pods: tuple[str, ...]
    devices: tuple[PreparedDevice, ...]
    pod_claim_name: str | None
    warnings: tuple[str, ...] = ()


def make_plan(
    claim: Mapping[str, Any], ref: ClaimRef, node: NodeView, taken_interfaces: Iterable[str]
) -> Plan:
    """Decide devices, device nodes, interface names. ``taken_interfaces`` are names that other claims
    of the same pods use already.

    Raises ClaimError that names the claim, the cause and the next step, NotYetError while a device node is missing.
    """
    check_claim(claim, ref)
    devices = claim["status"]["allocation"]["devices"]
    results = allocated(claim, node.driver)
    if not results:
        drivers = sorted({result["driver"] for result in devices.get("results", [])})
        raise ClaimError(
            f"{ref}: none of its devices is of driver {node.driver} (they are of {', '.join(drivers)})."
        )
    try:
        said = configs.decode_all(devices.get("config") or [], node.driver)
    except ConfigError as error:
        raise ClaimError(f"{ref}: {error}") from error
    configured = _configured_names(said, [result["request"] for result in results])
    planner = _Planner(ref, node, said, InterfaceNames(ref, taken_interfaces, configured), pod_name(claim))
    planner.count_nics(results)
    planner.refuse_wrong_kinds(results)
    prepared = tuple(planner.device(result) for result in results)
    return Plan(reserved_pods(claim), prepared, pod_claim_name(claim), tuple(planner.nodes.warnings))


def _refs(function: PciFunction) -> tuple[RdmaDeviceRef, ...]:
    return tuple(RdmaDeviceRef(one.name, one.node_guid, one.soft) for one in function.rdma_devices)


def _configured_names(said: Sequence[ClaimConfig], requests: Iterable[str]) -> set[str]:
    """The interface names that users ask for."""
    return {
        name
        for request in requests
        for kind in (RdmaVfConfig, RdmaSharedConfig)
        if (name := configs.merged(said, request, kind).interface_name)
    }


class _Planner:
    def __init__(
        self, ref: ClaimRef, node: NodeView, said: list[ClaimConfig], interfaces: InterfaceNames, pod: str
    ) -> None:
        self._ref, self._node, self._configs, self._interfaces, self._pod = ref, node, said, interfaces, pod
        self._nics_of: Counter[str] = Counter()  # request -> how many NICs it has
        self.nodes = DeviceNodes(ref, node)

    def count_nics(self, results: Iterable[Mapping[str, Any]]) -> None:
        """Some settings are for a request of one NIC."""
        for result in results:
            self._nics_of[result["request"]] += len(self._offered(result).nics)

    def refuse_wrong_kinds(self, results: Iterable[Mapping[str, Any]]) -> None:
        """A config without effect would look like success."""
        shared = [(one["request"], self._offered(one).sub_interfaces > 0) for one in results]
        try:
            configs.refuse_wrong_kinds(self._configs, shared)
        except ConfigError as error:
            raise ClaimError(f"{self._ref}: {error}") from error

    def device(self, result: Mapping[str, Any]) -> PreparedDevice:
        offered = self._offered(result)
        request = result["request"].split("/", 1)[0]
        if not _LABEL.fullmatch(request):  # the API server has seen to it; it becomes part of a path
            raise ClaimError(
                f"{self._ref}: {request!r} is no name of a request. Is this a claim of the API server's?"
            )
        admin = bool(result.get("adminAccess"))
        nodes, vendor_ids = self.nodes.of_gpus(offered)
        kind = RdmaSharedConfig if offered.sub_interfaces else RdmaVfConfig
        nics = []
        for address in offered.nics:
            function = self._node.inventory.functions[address]
            nic = self._nic_of(offered, function, result, admin)
            if nic is None or not nic.passes_through:
                nodes += self.nodes.of_rdma(function, shared=offered.sub_interfaces > 0)
            if nic is not None:
                nics.append(nic)
        attributes = {name: api_attribute(value) for name, value in offered.told.items()}
        if nics:
            attributes[names.INTERFACE] = api_attribute(
                ",".join(nic.pod_interface for nic in nics if nic.interface)
            )
        hints = bool(self._config(result["request"], kind).env_hints)
        return PreparedDevice(
            request=request,
            pool=result["pool"],
            device=result["device"],
            gpus=offered.gpus,
            nics=tuple(nics),
            nodes=tuple(dict.fromkeys(nodes)),
            vendor_cdi_ids=tuple(vendor_ids),
            attributes=attributes,
            admin_access=admin,
            partition=offered.partition,
            env_hints=hints,
            nccl_topology=hints and self._node.nccl_topology,
            share_id=result.get("shareID"),
        )

    def _offered(self, result: Mapping[str, Any]) -> OfferedDevice:
        offered = self._node.offer.by_name.get(result["device"])
        # a device that pods hold is published also when its hardware is gone
        there = offered is not None and all(
            self.nodes.is_there(one) for one in (*offered.gpus, *offered.nics)
        )
        if result["pool"] != self._node.pool or offered is None or not there:
            raise ClaimError(
                f"{self._ref}: device {result['pool']}/{result['device']} is not on node {self._node.pool} (any more). "
                "Delete the pod, so that its successor is given devices that are there."
            )
        return offered

    def _share(self, result: Mapping[str, Any]) -> str:
        try:
            return share_of(result)
        except RailmateError as error:
            raise ClaimError(f"{self._ref}: {error}") from error

    def _config(self, request: str, kind: type[Config]) -> Config:
        return configs.merged(self._configs, request, kind)

    # --- NICs
    def _nic_of(
        self, offered: OfferedDevice, function: PciFunction, result: Mapping[str, Any], admin: bool
    ) -> PreparedNic | None:
        """None for admin access, which looks on."""
        if admin:
            return None
        if offered.sub_interfaces:
            return self._sub_interface(function, self._share(result), result["request"])
        return self._nic(function, result["request"])

    def _nic(self, function: PciFunction, request: str) -> PreparedNic:
        """``request`` as allocated, ``main`` or ``main/sub``."""
        config, base = self._config(request, RdmaVfConfig), request.split("/", 1)[0]
        rdma = _refs(function)
        try:
            alone, netdev = self._nics_of[request] == 1, nicplan.expects_netdev(function)
            if netdev and config.driver is None and nicplan.loses_netdev(function, self._node.inventory):
                nicplan.refuse_lost_netdev(config, function)
                netdev = False
            change = functionplan.change_of(config, function, self._node.inventory, alone, netdev, rdma)
            if change is not None and change.passes_through:
                wanted = NetdevSettings(vf=change.wanted)
                return PreparedNic(function.address, "", settings=wanted, change=change)
            if not netdev:
                nicplan.refuse_without_netdev(config, function)
                settings = nicplan.without_netdev(config, function)
                return PreparedNic(function.address, "", settings=settings, rdma=rdma, change=change)
            settings = nicplan.settings_of(config, function, self._node.inventory, alone)
        except nicplan.SettingsError as error:
            raise ClaimError(f"{self._ref}: request {base}: {error}.") from error
        interface = self._interfaces.name(base, config.interface_name)
        self._interfaces.refuse_long(settings.interface(interface))
        ipam = self._ipam(config, settings.interface(interface))
        return PreparedNic(
            function.address, interface, settings=settings, ipam=ipam, rdma=rdma, change=change
        )

    def _sub_interface(self, function: PciFunction, share: str, request: str) -> PreparedNic:
        config, base = self._config(request, RdmaSharedConfig), request.split("/", 1)[0]
        try:
            alone = self._nics_of[request] == 1
            sub, settings = nicplan.sub_interface_of(config, function, share, alone)
        except nicplan.SettingsError as error:
            raise ClaimError(f"{self._ref}: request {base}: {error}.") from error
        interface = self._interfaces.name(base, config.interface_name)
        ipam = self._ipam(config, interface)
        rdma = _refs(function)
        return PreparedNic(function.address, interface, settings=settings, ipam=ipam, rdma=rdma, sub=sub)

    def _ipam(self, config: NetdevConfig, interface: str) -> IpamRequest | None:
        if config.ipam is None:
            return None
        name, directory = config.ipam["type"], self._node.cni_dir
        if directory is None or not self._node.node_exists(directory / name):
            where = (
                f"in {directory} on node"
                if directory
                else "for want of a CNI directory (--cni-bin-dir) on node"
            )
            raise ClaimError(
                f"{self._ref}: there is no IPAM plugin {name!r} {where} {self._node.pool}. "
                "Install it there, or name another one."
            )
        return IpamRequest(config.ipam, self._ref.uid, interface, self._ref.namespace, self._pod)
