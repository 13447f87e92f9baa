"""The topology's data. Nothing here touches the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Distance(StrEnum):
    """How far a NIC is from a GPU, in ``nvidia-smi topo -m``'s words, nearest first."""

    PIX = "PIX"
    PXB = "PXB"
    PHB = "PHB"
    NODE = "NODE"
    SYS = "SYS"


class NcclDistance(StrEnum):
    """How far a NIC is from a GPU in NCCL's words, nearest first. PHB takes in NODE."""

    PIX = "PIX"
    PXB = "PXB"
    P2C = "P2C"  # the GPU reaches the NIC's processor by NVLink-C2C
    PHB = "PHB"
    SYS = "SYS"


class MachineClass(StrEnum):
    SWITCHED = "switched"
    INTEGRATED = "integrated"
    FLAT = "flat"
    VIRTUAL = "virtual"
    DATA_DIRECT = "dataDirect"


class Role(StrEnum):
    RAIL = "rail"
    MANAGEMENT = "management"
    STORAGE = "storage"
    OTHER = "other"


class Source(StrEnum):
    """Where an answer comes from; a guess is never shown as knowledge."""

    SYSFS = "sysfs"
    OVERRIDE = "override"
    DATA_DIRECT = "dataDirect"
    NUMA = "numa"


@dataclass(frozen=True, slots=True)
class GpuNicPath:
    """The way between one GPU and one physical NIC function."""

    gpu: str
    nic: str
    distance: Distance
    pcie_switch: str | None  # BDF of the shared switch's upstream port, None where none is shared
    source: Source
    nccl_distance: NcclDistance  # what NCCL works out by itself, without a topology file


@dataclass(frozen=True, slots=True)
class Pair:
    """What the matching gives: which rail NICs (physical functions) belong to which GPUs.

    One GPU with one or more NICs; where NICs are fewer than GPUs, a group of GPUs with their NIC.
    """

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    distance: Distance  # the worst of the pair
    pcie_switch: str | None
    source: Source


@dataclass(frozen=True, slots=True)
class Topology:
    """All answers about a machine. Maps are keyed by address; VFs have what their PF has."""

    machine_class: MachineClass  # of the machine as sysfs shows it, whatever an override says
    paths: tuple[GpuNicPath, ...] = ()  # every GPU x physical NIC, GPUs outer, PCI order
    pairs: tuple[Pair, ...] = ()
    shares: tuple[Pair, ...] = ()  # each GPU of a pair of several, alone with the NICs that they share
    roles: Mapping[str, Role] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)  # device -> its pcieSwitch
    rails: Mapping[str, int] = field(default_factory=dict)  # GPU or NIC -> rail ordinal
    sources: Mapping[str, Source] = field(default_factory=dict)  # GPU or NIC -> where its place is from
    numa_nodes: Mapping[str, int] = field(default_factory=dict)  # GPU or NIC -> NUMA node where known
    notes: tuple[str, ...] = ()  # sentences for people: why pairs are by NUMA, what was not known
