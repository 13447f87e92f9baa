"""From an allocated claim to what is to be done for it. A pure function; nothing is touched here.

Source of the claim's shape: k8s.io/api resource/v1 (AllocationResult, DeviceAllocationConfiguration).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from railmate.cdi.spec import DeviceNode
from railmate.claims.records import ClaimRef, PreparedDevice, PreparedNic
from railmate.errors import RailmateError
from railmate.inventory.gpus import SHARED_NODES
from railmate.inventory.model import Gpu, Inventory, PciFunction
from railmate.publish.model import Offer, OfferedDevice
from railmate.publish.slices import api_attribute
from railmate_api import attributes as names
from railmate_api.config import ConfigError, RdmaVfConfig, decode, merge

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
    vendor_cdi: Mapping[str, str] = field(default_factory=dict)  # GPU UUID -> CDI ID


@dataclass(frozen=True, slots=True)
class Plan:
    pods: tuple[str, ...]
    devices: tuple[PreparedDevice, ...]
    pod_claim_name: str | None
    netdevs: Mapping[str, str]  # NIC address -> its netdev's name on the node; to be snapshotted
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


def make_plan(
    claim: Mapping[str, Any], ref: ClaimRef, node: NodeView, taken_interfaces: Iterable[str]
) -> Plan:
    """Decide devices, device nodes, interface names. ``taken_interfaces`` are names that other claims
    of the same pods use already.

    Raises ClaimError that names the claim, the cause and the next step.
    """
    check_claim(claim, ref)
    devices = claim["status"]["allocation"]["devices"]
    results = [result for result in devices.get("results", []) if result["driver"] == node.driver]
    if not results:
        drivers = sorted({result["driver"] for result in devices.get("results", [])})
        raise ClaimError(
            f"{ref}: none of its devices is of driver {node.driver} (they are of {', '.join(drivers)})."
        )
    pods = tuple(
        user["uid"] for user in claim["status"].get("reservedFor", []) if user.get("resource") == "pods"
    )
    planner = _Planner(ref, node, devices.get("config", []), set(taken_interfaces))
    prepared = tuple(planner.device(result) for result in results)
    if len(pods) > 1 and any(device.nics for device in prepared):
        raise ClaimError(
            f"{ref}: it holds a NIC and is reserved for {len(pods)} pods, but a NIC can be in one pod only. "
            "Give each pod a claim of its own through a ResourceClaimTemplate."
        )
    annotations = claim["metadata"].get("annotations") or {}
    return Plan(pods, prepared, annotations.get(POD_CLAIM_NAME), planner.netdevs, tuple(planner.warnings))


class _Planner:
    def __init__(
        self, ref: ClaimRef, node: NodeView, configs: list[Mapping[str, Any]], taken: set[str]
    ) -> None:
        self._ref, self._node, self._configs, self._taken = ref, node, configs, taken
        self._gpus = {gpu.address: gpu for gpu in node.inventory.gpus}
        self._nics_named: dict[str, int] = {}  # request -> how many NICs have a name from its config
        self.netdevs: dict[str, str] = {}
        self.warnings: list[str] = []

    def device(self, result: Mapping[str, Any]) -> PreparedDevice:
        offered = self._offered(result)
        request = result["request"].split("/", 1)[0]
        nodes, vendor_ids = self._gpu_nodes(offered)
        nics = []
        for address in offered.nics:
            function = self._node.inventory.functions[address]
            nodes += self._rdma_nodes(function)
            nics.append(self._nic(function, request, self._config(result["request"])))
        attributes = {name: api_attribute(value) for name, value in offered.attributes.items()}
        if nics:
            attributes[names.INTERFACE] = api_attribute(
                ",".join(nic.interface for nic in nics if nic.interface)
            )
        return PreparedDevice(
            request=request,
            pool=result["pool"],
            device=result["device"],
            gpus=offered.gpus,
            nics=tuple(nics),
            nodes=tuple(dict.fromkeys(nodes)),
            vendor_cdi_ids=tuple(vendor_ids),
            attributes=attributes,
        )

    def _offered(self, result: Mapping[str, Any]) -> OfferedDevice:
        offered = self._node.offer.by_name.get(result["device"])
        if result["pool"] != self._node.pool or offered is None:
            raise ClaimError(
                f"{self._ref}: device {result['pool']}/{result['device']} is not on node {self._node.pool} (any more). "
                "Delete the pod, so that its successor is given devices that are there."
            )
        return offered

    # --- config
    def _config(self, request: str) -> RdmaVfConfig:
        """All config that speaks of ``request`` (``main`` or ``main/sub``), merged, class before claim."""
        found = []
        for position, entry in enumerate(self._configs):
            opaque = entry.get("opaque")
            if not opaque or opaque["driver"] != self._node.driver:
                continue
            wanted = entry.get("requests") or []
            if wanted and request not in wanted and request.split("/", 1)[0] not in wanted:
                continue
            try:
                found.append(decode(opaque.get("parameters") or {}))
            except ConfigError as error:
                where = "DeviceClass" if entry.get("source") == "FromClass" else "claim"
                raise ClaimError(
                    f"{self._ref}: config {position} (from the {where}): {error}. "
                    f"Correct it in the {where} and make the pod again."
                ) from error
        return merge(found)

    # --- NICs
    def _nic(self, function: PciFunction, request: str, config: RdmaVfConfig) -> PreparedNic:
        if not function.netdevs:
            return PreparedNic(function.address, "")
        self.netdevs[function.address] = function.netdevs[0].name
        return PreparedNic(function.address, self._interface(request, config))

    def _interface(self, request: str, config: RdmaVfConfig) -> str:
        if config.interface_name is None:
            number = 1
            while f"net{number}" in self._taken:
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

    def _rdma_nodes(self, function: PciFunction) -> list[DeviceNode]:
        nodes = []
        for device in function.rdma_devices:
            nodes += [self._node_of(f"infiniband/{name}") for name in device.char_devices]
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
            vendor_id = self._node.vendor_cdi.get(gpu.uuid or "")
            if vendor_id:
                vendor_ids.append(vendor_id)
                continue
            nodes += self._own_gpu_nodes(gpu)
        return nodes, vendor_ids

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
        return DeviceNode(path=f"/dev/{name}", host_path=str(self._node.dev_root / name))
