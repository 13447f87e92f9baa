"""What the scheduler bench compares: ways to ask for GPU–NIC pairs, scheduler settings, and pods' requests.

A variant is written ``FORM[+WORD…]``: ``pairs``, ``node``, ``groups``, ``constraint``, ``pairs+proportional``,
``pairs+examples/scheduler/packing.yaml``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.machines import DEMO_MACHINE, DEMO_VFS_PER_RAIL, load_machine
from harness.shell import UsageError
from harness.sysfs import write_tree
from railmate.inventory.scan import scan
from railmate.publish.devices import OfferOptions, build_offer
from railmate.publish.model import Offer
from railmate.topology.analyze import analyze
from railmate_api import attributes as names

#: Of each node: what a DGX A100 has, so that an eighth of it goes with each of eight GPUs.
NODE_CPUS, NODE_MEMORY_GI = 256, 1024
_WHOLE = 8  # pairs of a node
_SMALL = {"cpu": "100m", "memory": "128Mi"}

#: GPU and NIC, as PCI addresses.
Pair = tuple[str, str]


class BenchMachine:
    """A node of the bench: 8 GPUs, 4 switches, 8 NICs with 4 VFs each."""

    def __init__(self) -> None:
        self._facts = load_machine(DEMO_MACHINE, vfs_per_rail=DEMO_VFS_PER_RAIL)
        with tempfile.TemporaryDirectory(prefix="railmate-bench-") as directory:
            root = Path(directory)
            write_tree(self._facts, root)
            self.inventory = scan(root / "sys", root / "proc")
        self.topology = analyze(self.inventory)

    @cached_property
    def gpus(self) -> int:
        return len(self.inventory.gpus)

    def aligned(self, pair: Pair) -> bool:
        """Whether the machine's facts, not our own topology, call this NIC right for this GPU."""
        gpu, nic = pair
        parent = self.inventory.functions[nic].physical_function or nic
        return parent in self._facts.expected["best"][gpu]

    def switch(self, address: str) -> str | None:
        return self.topology.switches.get(address)


@dataclass(frozen=True)
class Form:
    """A way to ask for pairs. ``offer``: what a node publishes for it; ``devices``: ``spec.devices`` of a claim for n
    pairs; ``pairs``: the pairs in a claim's allocation results."""

    name: str
    offer: Callable[[BenchMachine], Offer]
    devices: Callable[[int], dict[str, Any]]
    pairs: Callable[[Sequence[Mapping[str, Any]], Offer], list[Pair]]


def _pair_devices(count: int) -> dict[str, Any]:
    return {"requests": [request("pairs", names.CLASS_PAIR, count)]}


def _pairs_of_pairs(results: Sequence[Mapping[str, Any]], offer: Offer) -> list[Pair]:
    devices = [offer.by_name[result["device"]] for result in results]
    return [pair for device in devices for pair in zip(device.gpus, device.nics, strict=True)]


def _group_devices(count: int) -> dict[str, Any]:
    """Whole switches, of two pairs each, and what is left over as a pair."""
    switches, pairs = divmod(count, 2)
    requests = [request("switches", names.CLASS_GROUP, switches)] if switches else []
    return {"requests": requests + ([request("pairs", names.CLASS_PAIR, pairs)] if pairs else [])}


def _node_devices(count: int) -> dict[str, Any]:
    """A whole node as one device, anything less as pairs."""
    return {"requests": [request("node", names.CLASS_NODE)]} if count == _WHOLE else _pair_devices(count)


def _grouped_offer(machine: BenchMachine) -> Offer:
    return build_offer(machine.inventory, machine.topology, OfferOptions(switch_groups=True))


def _joined_offer(machine: BenchMachine) -> Offer:
    """GPUs and all VFs alone and without counters, as separate drivers for GPUs and NICs would publish them: the form
    with constraints is to have as little to look at as it can."""
    offer = build_offer(machine.inventory, machine.topology, OfferOptions(share_pair_vfs=True))
    alone = [device for device in offer.devices if device.kind in (names.KIND_GPU, names.KIND_RDMA_VF)]
    return Offer(tuple(replace(device, consumes=()) for device in alone))


def _joined_devices(count: int) -> dict[str, Any]:
    requests, constraints = [], []
    for index in range(count):
        pair = [f"gpu-{index}", f"vf-{index}"]
        requests += [request(pair[0], names.CLASS_GPU), request(pair[1], names.CLASS_RDMA_VF)]
        constraints.append({"requests": pair, "matchAttribute": names.PCIE_SWITCH})
    return {"requests": requests, "constraints": constraints}


def _pairs_of_joined(results: Sequence[Mapping[str, Any]], offer: Offer) -> list[Pair]:
    device = {result["request"]: offer.by_name[result["device"]] for result in results}
    gpus = [name for name in device if name.startswith("gpu-")]
    return [(device[name].gpus[0], device[name.replace("gpu-", "vf-")].nics[0]) for name in gpus]


def request(name: str, device_class: str, count: int = 1) -> dict[str, Any]:
    return {"name": name, "exactly": {"deviceClassName": device_class, "count": count}}


FORMS = {
    form.name: form
    for form in (
        Form("pairs", lambda m: build_offer(m.inventory, m.topology), _pair_devices, _pairs_of_pairs),
        Form("node", lambda m: build_offer(m.inventory, m.topology), _node_devices, _pairs_of_pairs),
        Form("groups", _grouped_offer, _group_devices, _pairs_of_pairs),
        Form("constraint", _joined_offer, _joined_devices, _pairs_of_joined),
    )
}


#: Words of a variant, in the order of Variant's fields.
WORDS = ("scheduler-limits", "controller-limits", "proportional")


@dataclass(frozen=True)
class Variant:
    """``config``: a KubeSchedulerConfiguration; None for the defaults. Limits of clients are raised unless
    ``scheduler_limits`` or ``controller_limits`` leaves them as they come. ``proportional``: pods ask for CPU and
    memory in proportion to their GPUs."""

    name: str
    form: Form
    config: Path | None = None
    scheduler_limits: bool = False
    controller_limits: bool = False
    proportional: bool = False

    def resources(self, pairs: int) -> dict[str, str]:
        """A pod's CPU and memory requests."""
        if not self.proportional:
            return dict(_SMALL)
        # a little less than the whole: daemons run on every node
        cpu, memory = NODE_CPUS * 1000 * 15 // 16 // 8, NODE_MEMORY_GI * 15 // 16 // 8
        return {"cpu": f"{cpu * pairs}m", "memory": f"{memory * pairs}Gi"}


def parse_variant(text: str) -> Variant:
    """Raises UsageError for a form or a word that is unknown."""
    name, *words = text.split("+")
    if name not in FORMS:
        raise UsageError(f"no form {name!r}; there are {', '.join(FORMS)}")
    config, known = None, dict.fromkeys(WORDS, False)
    for word in words:
        if word in known:
            known[word] = True
        elif Path(word).is_file():
            config = Path(word)
        else:
            raise UsageError(
                f"{text}: {word!r} is none of {', '.join(WORDS)}, and no file with a KubeSchedulerConfiguration"
            )
    short = "+".join([name, *(Path(word).stem if Path(word).is_file() else word for word in words)])
    return Variant(short, FORMS[name], config, *known.values())
