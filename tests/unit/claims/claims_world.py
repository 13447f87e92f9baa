"""A small node for the claims' tests: two GPUs, four VFs, their devices, and claims as the API server has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from railmate.claims.ledger import Ledger
from railmate.claims.plan import NodeView
from railmate.claims.records import ClaimRef
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.sandbox import Sandbox
from railmate.claims.state import ClaimState
from railmate.claims.surroundings import Surroundings
from railmate.inventory.model import Gpu, GpuVendor, Inventory, Netdev, Nic, PciFunction, RdmaDevice
from railmate.publish.model import Offer, OfferedDevice

DRIVER, POOL = "railmate.dev", "node1"
BOOT = "boot-1"
PF = "0000:0c:00.0"
PORT, PORT_MAC = "enp12s0np0", "02:00:00:00:03:fe"
GPUS = ("0000:07:00.0", "0000:0f:00.0")
VFS = ("0000:0c:00.1", "0000:0c:00.2", "0000:0c:00.3", "0000:0c:00.4")


def uid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def function(address: str, **more: Any) -> PciFunction:
    return PciFunction(address, ("pci0000:00", address), 0x020000, 0x15B3, 0x101C, driver="mlx5_core", **more)


def inventory() -> Inventory:
    gpus = tuple(
        Gpu(
            PciFunction(address, ("pci0000:00", address), 0x030200, 0x10DE, 0x20B0, driver="nvidia"),
            GpuVendor.NVIDIA,
            device_nodes=(f"nvidia{number}",),
            index=number,
            uuid=f"GPU-{number}",
        )
        for number, address in enumerate(GPUS)
    )
    vfs = [
        function(
            address,
            physical_function=PF,
            netdevs=(Netdev(f"vf{number}", "02:00:00:00:00:01", 1500, link_type="ether"),),
            rdma_devices=(
                RdmaDevice(
                    f"mlx5_{number}", "Ethernet", uverbs=(f"uverbs{number}",), umad=(f"umad{number}",)
                ),
            ),
        )
        for number, address in enumerate(VFS)
    ]
    pf = function(
        PF,
        virtual_functions=VFS,
        netdevs=(Netdev(PORT, PORT_MAC, link_type="ether"),),
        rdma_devices=(
            RdmaDevice("mlx5_pf", "Ethernet", uverbs=("uverbs9",), umad=("umad9",), issm=("issm9",)),
        ),
    )
    functions = {one.address: one for one in [*(gpu.function for gpu in gpus), pf, *vfs]}
    nics = (Nic(pf), *(Nic(vf, vf_index=number) for number, vf in enumerate(vfs)))
    return Inventory(functions, gpus, nics)


def offer() -> Offer:
    devices = [
        OfferedDevice(f"pair-{n}", "pair", {"railmate.dev/distance": "PXB"}, gpus=(GPUS[n],), nics=(VFS[n],))
        for n in range(2)
    ]
    devices += [OfferedDevice(f"gpu-{n}", "gpu", {}, gpus=(GPUS[n],)) for n in range(2)]
    devices += [OfferedDevice(f"vf-{n}", "rdma-vf", {}, nics=(VFS[n],)) for n in range(4)]
    devices += [OfferedDevice("shared", "rdma-shared", {}, nics=(PF,), sub_interfaces=4)]
    devices += [OfferedDevice("port", "rdma-vf", {}, nics=(PF,))]
    devices += [OfferedDevice("wide", "pair", {}, gpus=(GPUS[0],), nics=VFS[:2])]
    return Offer(tuple(devices))


def view(**more: Any) -> NodeView:
    values: dict[str, Any] = {
        "driver": DRIVER,
        "pool": POOL,
        "offer": offer(),
        "inventory": inventory(),
        "dev_root": Path("/host/dev"),
        "node_exists": lambda path: True,
        "netdev_of": lambda address: inventory().functions[address].netdevs[0].name,
    }
    return NodeView(**(values | more))


def ref(number: int = 1) -> ClaimRef:
    return ClaimRef(uid(number), "team", f"claim-{number}")


def result(device: str, request: str = "main", **more: Any) -> dict[str, Any]:
    return {"request": request, "driver": DRIVER, "pool": POOL, "device": device} | more


def share(number: int, request: str = "main", device: str = "shared") -> dict[str, Any]:
    """A share of the physical function, as the scheduler allocates it (KEP-5075)."""
    consumed = {"railmate.dev/subInterfaces": "1"}
    return result(
        device, request, shareID=f"5a5e0000-0000-4000-8000-{number:012d}", consumedCapacity=consumed
    )


def config(
    source: str = "FromClaim", requests: list[str] | None = None, driver: str = DRIVER, **fields: Any
) -> Any:
    parameters = {"apiVersion": "railmate.dev/v1alpha1", "kind": "RdmaVfConfig", **fields}
    return {
        "source": source,
        "requests": requests or [],
        "opaque": {"driver": driver, "parameters": parameters},
    }


def vfio_config(source: str = "FromClaim", requests: list[str] | None = None, **fields: Any) -> Any:
    """A config whose own field ``driver`` is vfio-pci."""
    made = config(source, requests, **fields)
    made["opaque"]["parameters"]["driver"] = "vfio-pci"
    return made


def claim(
    number: int = 1,
    *results: dict[str, Any] | str,
    configs: list[Any] | None = None,
    pods: tuple[str, ...] = ("pod-1",),
    template: str | None = None,
) -> dict[str, Any]:
    """A claim allocated on the node; results are devices' names or whole results."""
    metadata: dict[str, Any] = {"namespace": "team", "name": f"claim-{number}", "uid": uid(number)}
    if template:
        metadata["annotations"] = {"resource.kubernetes.io/pod-claim-name": template}
    devices: dict[str, Any] = {
        "results": [result(r) if isinstance(r, str) else r for r in results or ("pair-0",)]
    }
    if configs:
        devices["config"] = configs
    return {
        "metadata": metadata,
        "status": {
            "allocation": {"devices": devices},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": pod} for pod in pods],
        },
    }


class FakeClaims:
    """The API server's claims, by name."""

    def __init__(self, *claims: dict[str, Any]) -> None:
        self.claims = {one["metadata"]["name"]: one for one in claims}
        self.gets = 0
        self.errors: list[Exception] = []  # of the next calls

    def put(self, *claims: dict[str, Any]) -> None:
        self.claims |= {one["metadata"]["name"]: one for one in claims}

    def get_claim(self, namespace: str, name: str) -> dict[str, Any]:
        self.gets += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.claims[name]


def state(
    root: Path,
    api: FakeClaims,
    *,
    boot: str = BOOT,
    node: NodeView | None = None,
    around: Surroundings | None = None,
) -> ClaimState:
    """A driver instance on ``root``; several may share it."""
    plugin = root / "plugins" / DRIVER
    files = RuntimeFiles(DRIVER, plugin, root / "cdi", plugin / "gate")
    return ClaimState(api, node or view(), Ledger(plugin), files, boot, around)


def sandbox(name: str = "sandbox-1", pod: str = "pod-1", netns: str | None = "/run/netns/1") -> Sandbox:
    return Sandbox(name, pod, f"team/{pod}", Path(netns) if netns else None)


NodeExists = Callable[[Path], bool]


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
