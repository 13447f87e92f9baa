"""Sentences for people: which class of machine this is, and why its pairs are what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from railmate.topology.model import Distance, MachineClass, Pair, Source

_SHOWN: Mapping[MachineClass, str] = {
    MachineClass.INTEGRATED: "GPUs and NICs are endpoints of shared host bridges and no PCIe switch is visible",
    MachineClass.FLAT: "no GPU shares a PCIe switch with a NIC that could be its rail",
    MachineClass.VIRTUAL: "the hypervisor's PCIe tree says nothing about switches",
    MachineClass.DATA_DIRECT: (
        "GPUs and NICs never share a PCIe switch here and no data-direct function was found beside a GPU"
    ),
    MachineClass.SWITCHED: "GPUs and NICs share PCIe switches",
}
_SO: Mapping[MachineClass, str] = {
    MachineClass.INTEGRATED: (
        "so pairs are by host bridge, else by NUMA node. If the vendor publishes a topology, give it as an override."
    ),
    MachineClass.FLAT: (
        "so pairs are by host bridge, else by NUMA node; NCCL sends data of such pairs through host memory unless "
        "it is told otherwise."
    ),
    MachineClass.VIRTUAL: (
        "so pairs are by NUMA node and may be wrong. If the vendor publishes a topology, give it as an override."
    ),
    MachineClass.DATA_DIRECT: "so pairs are by NUMA node.",
}


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What an analysis rests on."""

    machine_class: MachineClass
    gpus: tuple[str, ...]
    rails: tuple[str, ...]
    pairs: tuple[Pair, ...]
    numa_known: bool  # of any GPU
    shared_switches: bool  # a GPU and a NIC that could be a rail share a switch, by sysfs or override
    data_direct: bool
    stated_switches: int  # by the override


def explain(knowledge: Knowledge) -> tuple[str, ...]:
    """Nothing to say of a switched machine whose GPUs all have their NIC."""
    if not knowledge.gpus:
        return ("No GPU was found.",)
    if not knowledge.rails:
        return ("No NIC was found that could be a GPU's rail.",)
    notes = [*_class(knowledge)]
    if not knowledge.shared_switches and not knowledge.numa_known:
        notes.append(
            "The kernel knows no NUMA node of any GPU, so pairs are by host bridge where a GPU shares one with a "
            "NIC, else by PCI order only."
        )
    notes += _without_nearness(knowledge)
    paired = {gpu for pair in knowledge.pairs for gpu in pair.gpus}
    what = "PCIe switch" if knowledge.shared_switches else "NUMA node"
    notes += [
        f"GPU {gpu} is in no pair: no rail NIC is on its {what}."
        for gpu in knowledge.gpus
        if gpu not in paired
    ]
    return tuple(notes)


def _without_nearness(knowledge: Knowledge) -> list[str]:
    """Pairs that are weaker than the machine's others."""
    by_numa = [pair for pair in knowledge.pairs if pair.source is Source.NUMA]
    if knowledge.shared_switches:
        return [
            f"{_named('GPU', pair.gpus)} and {_named('NIC', pair.nics)} share no PCIe switch; they are together by "
            f"{'host bridge' if pair.distance is Distance.PHB else 'NUMA node'}."
            for pair in by_numa
        ]
    far = [gpu for pair in by_numa if pair.distance is Distance.SYS for gpu in pair.gpus]
    if not far or not knowledge.numa_known:
        return []
    return [
        f"No NIC of its own NUMA node is left for each GPU: {_named('GPU', far)} share NICs evenly with the others "
        "over the whole node (distance SYS)."
        if len(far) > 1
        else f"No NIC of its own NUMA node is left for GPU {far[0]} (distance SYS)."
    ]


def _named(what: str, addresses: Sequence[str]) -> str:
    return f"{what}{'s' if len(addresses) > 1 else ''} {', '.join(addresses)}"


def _class(knowledge: Knowledge) -> list[str]:
    machine_class = knowledge.machine_class
    if knowledge.stated_switches:
        return [
            f"The override tells the PCIe switches of this machine ({knowledge.stated_switches}). "
            f"By itself its class is {machine_class}: {_SHOWN[machine_class]}."
        ]
    if knowledge.data_direct:
        notes = [
            "Class dataDirect: data go from GPU to NIC by the NIC's DMA function beside the GPU, which its vital "
            "product data tie to it, so pairs are by that."
        ]
        by_numa = sum(len(pair.gpus) for pair in knowledge.pairs if pair.source is Source.NUMA)
        if by_numa:
            notes.append(f"{by_numa} GPUs have no data-direct function beside them; theirs are by NUMA node.")
        return notes
    if not knowledge.shared_switches and machine_class in _SO:
        return [f"Class {machine_class}: {_SHOWN[machine_class]}, {_SO[machine_class]}"]
    if machine_class is MachineClass.VIRTUAL:
        return [
            "Class virtual: the PCIe switches are the hypervisor's; railmate trusts that it shows them as they are."
        ]
    return []
