"""From an allocated claim to what is to be done for it. A pure function; nothing is touched here.

Source of the claim's shape: k8s.io/api resource/v1 (AllocationResult, DeviceAllocationConfiguration).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from railmate.attach.ipam import IpamRequest
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.attach.settings import NetdevSettings
from railmate.cdi.spec import DeviceNode
from railmate.claims import configs, functionplan, nicplan
from railmate.claims.configs import ClaimConfig
from railmate.claims.records import ClaimRef, PreparedDevice, PreparedNic
from railmate.claims.shares import share_of
from railmate.errors import RailmateError
from railmate.inventory.gpus import SHARED_NODES
from railmate.inventory.model import Gpu, GpuVendor, Inventory, PciFunction
from railmate.publish.model import Offer, OfferedDevice
from railmate.publish.slices import api_attribute
from railmate_api import attributes as names
from railmate_api.config import Config, ConfigError, NetdevConfig, RdmaSharedConfig, RdmaVfConfig

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # DNS label, RFC 1123
POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"


class ClaimError(RailmateError):
    """This claim cannot be prepared; trying again changes nothing unless somebody changes something."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """What the node has to offer, as planning sees it."""

    driver: str
    pool: str
    offer: Offer
    inventory: Inventory
    dev_root: Path
    node_exists: Callable[[Path], bool]
    netdev_of: Callable[[str], str | None]  # NIC address -> its netdev's name on the node at this moment
    vendor_cdi: Callable[[], Mapping[str, str]] = (
        dict  # GPU UUID -> CDI ID, as the vendors' specs say at this moment
    )
    cni_dir: Path | None = None  # where the node's CNI IPAM plugins are
    nccl_topology: bool = False  # whether the node has an NCCL topology file to give
    sysfs_root: Path = Path("/sys")
    #: The character devices of an RDMA device at this moment; none where they cannot be known.
    char_devices: Callable[[str], tuple[str, ...]] = lambda device: ()


@dataclass(frozen=True, slots=True)
class Plan:
    pods: tuple[str, ...]
    devices: tuple[PreparedDevice, ...]
    pod_claim_name: str | None
    warnings: tuple[str, ...] = ()


def check_claim(claim: Mapping[str, Any], ref: ClaimRef) -> None:
    """Raise ClaimError unless this is the claim the kubelet means, allocated and in use."""
    uid = claim["metadata"]["uid"]
    if uid != ref.uid:
        raise ClaimError(
            f"{ref}: it was replaced (UID {ref.uid} was asked for, the API server has {uid}). "
            "Delete the pod; its successor gets the new claim."
        )
    if not claim.get("status", {}).get("allocation"):
        raise ClaimError(f"{ref}: it is not allocated. The scheduler allocates it when its pod is scheduled.")


def allocated(claim: Mapping[str, Any], driver: str) -> list[Mapping[str, Any]]:
    """The allocation's results that are ours."""
    results = claim["status"]["allocation"]["devices"].get("results") or []
    return [result for result in results if result["driver"] == driver]


def reserved_pods(claim: Mapping[str, Any]) -> tuple[str, ...]:
    """UIDs of the pods that the claim is reserved for."""
    users = claim["status"].get("reservedFor") or []
    return tuple(user["uid"] for user in users if user.get("resource") == "pods")


def _pod_name(claim: Mapping[str, Any]) -> str:
    """The name of the first pod that the claim is reserved for, for IPAM plugins that note it; "" without one."""
    users = claim["status"].get("reservedFor") or []
    return next((str(user.get("name", "")) for user in users if user.get("resource") == "pods"), "")


def refuse_shared_nic(ref: ClaimRef, pods: Sequence[str], devices: Iterable[PreparedDevice]) -> None:
    """Raise ClaimError when several pods want one NIC."""
    if len(pods) > 1 and any(device.nics for device in devices):
        raise ClaimError(
            f"{ref}: it holds a NIC and is reserved for {len(pods)} pods, but a NIC can be in one pod only. "
            "Give each pod a claim of its own through a ResourceClaimTemplate."
        )


def make_plan(
    claim: Mapping[str, Any], ref: ClaimRef, node: NodeView, taken_interfaces: Iterable[str]
) -> Plan:
    """Decide devices, device nodes, interface names. ``taken_interfaces`` are names that other claims
    of the same pods use already.

    Raises ClaimError that names the claim, the cause and the next step.
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
    planner = _Planner(ref, node, said, set(taken_interfaces))
    planner.keep_configured_names([result["request"] for result in results])
    planner.pod_name = _pod_name(claim)
    planner.count_nics(results)
    planner.refuse_wrong_kinds(results)
    prepared = tuple(planner.device(result) for result in results)
    pods = reserved_pods(claim)
    refuse_shared_nic(ref, pods, prepared)
    annotations = claim["metadata"].get("annotations") or {}
    return Plan(pods, prepared, annotations.get(POD_CLAIM_NAME), tuple(planner.warnings))


def expects_netdev(function: PciFunction) -> bool:
    """Whether the NIC has a netdev, wherever that is at the moment.

    A RoCE port always has one. It must not be judged by what sysfs shows alone: there a netdev that is in
    another namespace is absent.
    """
    return bool(function.netdevs) or any(device.link_layer == "Ethernet" for device in function.rdma_devices)


def _refs(function: PciFunction) -> tuple[RdmaDeviceRef, ...]:
    return tuple(RdmaDeviceRef(one.name, one.node_guid, one.soft) for one in function.rdma_devices)


class _Planner:
    def __init__(self, ref: ClaimRef, node: NodeView, said: list[ClaimConfig], taken: set[str]) -> None:
        self._ref, self._node, self._configs, self._taken = ref, node, said, taken
        self._gpus = {gpu.address: gpu for gpu in node.inventory.gpus}
        self._nics_named: dict[str, int] = {}  # request -> how many NICs have a name from its config
        self._reserved: set[str] = set()
        self._nics_of: Counter[str] = Counter()  # request -> how many NICs it has
        self.pod_name = ""
        self._vendor_cdi = node.vendor_cdi()
        self.warnings: list[str] = []

    def keep_configured_names(self, requests: Iterable[str]) -> None:
        """Default names keep clear of those that users ask for, whichever request comes first."""
        self._reserved = {
            name
            for request in requests
            for kind in (RdmaVfConfig, RdmaSharedConfig)
            if (name := self._config(request, kind).interface_name)
        }

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
        nodes, vendor_ids = self._gpu_nodes(offered)
        kind = RdmaSharedConfig if offered.sub_interfaces else RdmaVfConfig
        nics = []
        for address in offered.nics:
            function = self._node.inventory.functions[address]
            nic = self._nic_of(offered, function, result, admin)
            if nic is None or not nic.passes_through:
                nodes += self._rdma_nodes(function, shared=offered.sub_interfaces > 0)
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
        there = offered is not None and self._node.inventory.functions.keys() >= {
            *offered.gpus,
            *offered.nics,
        }
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
            alone, netdev = self._nics_of[request] == 1, expects_netdev(function)
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
        interface = self._interface(base, config)
        if len(settings.interface(interface)) > 15:
            raise ClaimError(
                f"{self._ref}: the partition's interface {settings.interface(interface)!r} has a name longer than 15 "
                "characters. Choose an interfaceName of at most 10."
            )
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
        interface = self._interface(base, config)
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
        return IpamRequest(config.ipam, self._ref.uid, interface, self._ref.namespace, self.pod_name)

    def _interface(self, request: str, config: NetdevConfig) -> str:
        if config.interface_name is None:
            number = 1
            while f"net{number}" in self._taken | self._reserved:
                number += 1
            name = f"net{number}"
        else:
            ordinal = self._nics_named.get(request, 0)
            self._nics_named[request] = ordinal + 1
            name = f"{config.interface_name}{ordinal or ''}"
            if len(name) > 15:
                raise ClaimError(
                    f"{self._ref}: interface name {name!r} is longer than 15 characters. "
                    "Choose a shorter interfaceName: a number is appended for each further NIC of a request."
                )
        if name in self._taken:
            raise ClaimError(
                f"{self._ref}: interface name {name!r} is used twice in one pod. "
                "Give each request an interfaceName of its own."
            )
        self._taken.add(name)
        return name

    def _rdma_nodes(self, function: PciFunction, *, shared: bool) -> list[DeviceNode]:
        """Of a shared port no umad and issm: with those one pod could change the port that all others use."""
        nodes = []
        for device in function.rdma_devices:
            # a driver that was bound anew has new numbers, and the old ones may be another device's by now
            names = self._node.char_devices(device.name) or device.char_devices
            if shared:
                names = tuple(name for name in names if name.startswith("uverbs"))
            nodes += [self._node_of(f"infiniband/{name}") for name in names]
        if nodes:
            connection_manager = self._node_of("infiniband/rdma_cm")
            if self._node.node_exists(Path(connection_manager.host_path)):
                nodes.append(connection_manager)
        return nodes

    # --- GPUs
    def _gpu_nodes(self, offered: OfferedDevice) -> tuple[list[DeviceNode], list[str]]:
        nodes: list[DeviceNode] = []
        vendor_ids: list[str] = []
        for address in offered.gpus:
            gpu = self._gpus[address]
            if offered.partition:
                gpu = self._partition(gpu, offered.partition)
            vendor_id = self._vendor_cdi.get(gpu.uuid or "")
            if vendor_id:
                vendor_ids.append(vendor_id)
                continue
            nodes += self._own_gpu_nodes(gpu)
        return nodes, vendor_ids

    def _partition(self, gpu: Gpu, name: str) -> Gpu:
        """The GPU as one of its parts is to be seen: another UUID, and the nodes that open this part only."""
        part = next((one for one in gpu.partitions if one.name == name), None)
        if part is None:
            raise ClaimError(
                f"{self._ref}: GPU {gpu.address} has no partition {name} any more. "
                "Delete the pod, so that its successor is given devices that are there."
            )
        # a MIG instance is opened through its GPU's node and two of its own; an XCP has all of its nodes itself
        whole = gpu.device_nodes if gpu.vendor is GpuVendor.NVIDIA else ()
        return replace(gpu, uuid=part.uuid, device_nodes=(*whole, *part.device_nodes))

    def _own_gpu_nodes(self, gpu: Gpu) -> list[DeviceNode]:
        if not gpu.device_nodes:
            raise ClaimError(
                f"{self._ref}: GPU {gpu.address} has no device node. "
                f"Is the {gpu.vendor} driver loaded on node {self._node.pool}?"
            )
        self.warnings.append(
            f"{self._ref}: no CDI spec of the GPU's vendor names GPU {gpu.address} ({gpu.uuid or 'UUID unknown'}); "
            "the container gets its device nodes only, the user-space libraries must be in the image."
        )
        nodes = [self._node_of(name) for name in gpu.device_nodes]
        shared = [self._node_of(name) for name in SHARED_NODES.get(gpu.vendor, ())]
        return nodes + [node for node in shared if self._node.node_exists(Path(node.host_path))]

    def _node_of(self, name: str) -> DeviceNode:
        return DeviceNode.of(name, self._node.dev_root)
