"""Names that users see: the driver, DeviceClasses, attributes and config kinds.

Bare attribute names are filed under the driver's domain by the API server; railmate writes them
qualified, so that they stay ``railmate.dev/…`` whatever ``--driver-name`` says.
"""

from __future__ import annotations

from typing import Final

DRIVER_NAME: Final = "railmate.dev"
DOMAIN: Final = "railmate.dev"

# --- DeviceClasses
CLASS_GPU: Final = "gpu.railmate.dev"
CLASS_RDMA_VF: Final = "rdma-vf.railmate.dev"
CLASS_RDMA_SHARED: Final = "rdma-shared.railmate.dev"
CLASS_PAIR: Final = "gpu-rdma-pair.railmate.dev"
CLASS_PAIR_NUMA: Final = "gpu-rdma-pair-numa.railmate.dev"
CLASS_PAIR_ANY: Final = "gpu-rdma-pair-any.railmate.dev"
CLASS_GROUP: Final = "gpu-rdma-group.railmate.dev"
CLASS_NODE: Final = "gpu-rdma-node.railmate.dev"
CLASS_GPU_PARTITION: Final = "gpu-partition.railmate.dev"

# --- values of the `kind` attribute
KIND_GPU: Final = "gpu"
KIND_RDMA_VF: Final = "rdma-vf"
KIND_RDMA_SHARED: Final = "rdma-shared"  # a physical function that pods share through sub-interfaces
KIND_PAIR: Final = "pair"
KIND_GROUP: Final = "group"  # several GPUs with the NICs that are theirs together
KIND_NODE: Final = "node"  # all GPUs of a node, each with its NIC
KIND_HELD: Final = "held"  # in a pod, and no longer offered
KIND_GPU_PARTITION: Final = "gpu-partition"  # a MIG instance, an XCP

# --- standard attributes (k8s.io/dynamic-resource-allocation/deviceattribute)
PCI_BUS_ID: Final = "resource.kubernetes.io/pciBusID"
PCIE_ROOT: Final = "resource.kubernetes.io/pcieRoot"
NUMA_NODE: Final = "resource.kubernetes.io/numaNode"

# --- ours
KIND: Final = f"{DOMAIN}/kind"
PCIE_SWITCH: Final = f"{DOMAIN}/pcieSwitch"
RAIL: Final = f"{DOMAIN}/rail"
PAIR_RAIL: Final = f"{DOMAIN}/pairRail"  # of a pair: its rail counted among pairs, where that is another
TOPOLOGY_SOURCE: Final = f"{DOMAIN}/topologySource"
MACHINE_CLASS: Final = f"{DOMAIN}/machineClass"
VENDOR: Final = f"{DOMAIN}/vendor"
PRODUCT: Final = f"{DOMAIN}/product"
UUID: Final = f"{DOMAIN}/uuid"
ARCHITECTURE: Final = f"{DOMAIN}/architecture"
DRIVER_VERSION: Final = f"{DOMAIN}/driverVersion"
MEMORY: Final = f"{DOMAIN}/memory"  # a capacity, bytes
SUB_INTERFACES: Final = f"{DOMAIN}/subInterfaces"  # a capacity, how many a shared port may have
PROFILE: Final = f"{DOMAIN}/profile"  # of a partition: "1g.10gb", "CPX"
GPU_COUNT: Final = f"{DOMAIN}/gpuCount"  # of a group or node
NIC_COUNT: Final = f"{DOMAIN}/nicCount"
PF_NAME: Final = f"{DOMAIN}/pfName"
PF_PCI_BUS_ID: Final = f"{DOMAIN}/pfPciBusID"
VF_INDEX: Final = f"{DOMAIN}/vfIndex"
LINK_LAYER: Final = f"{DOMAIN}/linkLayer"
LINK_SPEED: Final = f"{DOMAIN}/linkSpeed"  # Mbit/s
RDMA_DEVICE: Final = f"{DOMAIN}/rdmaDevice"
RDMA_NETNS_MODE: Final = f"{DOMAIN}/rdmaNetnsMode"  # "shared" or "exclusive", rdma-system(8)
MODE: Final = f"{DOMAIN}/mode"  # "vf" or "pf"
DISTANCE: Final = f"{DOMAIN}/distance"
GPU_PCI_BUS_ID: Final = f"{DOMAIN}/gpuPciBusID"
NIC_PCI_BUS_ID: Final = f"{DOMAIN}/nicPciBusID"
SHARE_ID: Final = f"{DOMAIN}/shareID"  # in device metadata only: which share of a shared device it is
INTERFACE: Final = f"{DOMAIN}/interface"  # in device metadata only: the netdev's name in the pod
GID_INDEX: Final = f"{DOMAIN}/gidIndex"  # in device metadata only: the RoCE v2 GID of the pod's address
GID: Final = f"{DOMAIN}/gid"
VFIO_NODE: Final = f"{DOMAIN}/vfioDevice"  # in device metadata only: /dev/vfio/17

# --- config
CONFIG_API_VERSION: Final = "railmate.dev/v1alpha1"
CONFIG_KIND_RDMA_VF: Final = "RdmaVfConfig"
CONFIG_KIND_RDMA_SHARED: Final = "RdmaSharedConfig"
