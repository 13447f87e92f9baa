"""Counter sets: one truth about hardware that is offered under several names.

A GPU is offered alone and as a half of its pair. Both devices consume the GPU's counter, whose value
is 1, so the scheduler can hand out only one of them. Hardware that is offered under one name only
needs no counter. Limits (k8s.io/api resource/v1): 32 counters a set, a device consumes from at most
2 sets.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from railmate.publish.model import Offer, OfferedDevice

MAX_COUNTERS_PER_SET = 32
MAX_SETS_PER_DEVICE = 2


def assign_counters(devices: Sequence[OfferedDevice], switches: Mapping[str, str]) -> Offer:
    """Give every piece of hardware with several names a counter.

    Counters are grouped by switch where a switch's fit into one set; else each cluster of devices
    that share hardware has a set of its own. A cluster that is too large even for that (a GPU with
    dozens of NICs) loses the devices of its lone NICs, which a note tells: a NIC with one name needs no
    counter. Raises ValueError when a device would need more sets, or a set more counters, than the API
    allows, which would be a mistake in the mapping, not in the machine.
    """
    devices, notes = _without_crowds(devices)
    shared = _shared(devices)
    set_of = _group(shared, devices, switches)

    gpus = {gpu for device in devices for gpu in device.gpus}
    counter_of = {part: f"{'gpu' if part in gpus else 'vf'}-{_label(part)}" for part in shared}

    sets: dict[str, list[str]] = defaultdict(list)
    for part in shared:
        sets[set_of[part]].append(counter_of[part])
    counted = [_with_counters(device, set_of, counter_of) for device in devices]
    return Offer(tuple(counted), {name: tuple(held) for name, held in sorted(sets.items())}, notes)


def _shared(devices: Sequence[OfferedDevice]) -> list[str]:
    """Hardware that has several names."""
    uses = Counter(part for device in devices for part in device.gpus + device.nics)
    return [part for part, count in uses.items() if count > 1]


def _without_crowds(devices: Sequence[OfferedDevice]) -> tuple[list[OfferedDevice], tuple[str, ...]]:
    """Drops devices of lone NICs until each cluster fits into a counter set, and tells which."""
    dropped: set[str] = set()
    notes = []
    for cluster in _clusters(_shared(devices), devices):
        if len(cluster) <= MAX_COUNTERS_PER_SET:
            continue
        near = [device for device in devices if not cluster.isdisjoint(device.gpus + device.nics)]
        lone = {device.name for device in near if not device.gpus}
        dropped |= lone
        gpus = sorted({gpu for device in near for gpu in device.gpus})
        notes.append(
            f"{len(lone)} NICs of GPU {', '.join(gpus)} are offered only in its pair, not alone as well: "
            f"that would need {len(cluster)} counters, and a counter set holds {MAX_COUNTERS_PER_SET}"
        )
    kept = [device for device in devices if device.name not in dropped]
    largest = max(map(len, _clusters(_shared(kept), kept)), default=0)
    if largest > MAX_COUNTERS_PER_SET:
        raise ValueError(
            f"{largest} GPUs and NICs are offered together and one by one; {MAX_COUNTERS_PER_SET} is the most"
        )
    return kept, tuple(notes)


def _with_counters(
    device: OfferedDevice, set_of: Mapping[str, str], counter_of: Mapping[str, str]
) -> OfferedDevice:
    consumes = tuple((set_of[part], counter_of[part]) for part in device.gpus + device.nics if part in set_of)
    if len({name for name, _ in consumes}) > MAX_SETS_PER_DEVICE:
        raise ValueError(
            f"device {device.name} would consume from more than {MAX_SETS_PER_DEVICE} counter sets"
        )
    return replace(device, consumes=consumes)


def _group(
    shared: Sequence[str], devices: Sequence[OfferedDevice], switches: Mapping[str, str]
) -> dict[str, str]:
    """Hardware address to the name of its counter set."""
    clusters = _clusters(shared, devices)
    by_switch: dict[str, list[frozenset[str]]] = defaultdict(list)
    result: dict[str, str] = {}
    for cluster in clusters:
        homes = {switches.get(part) for part in cluster}
        home = homes.pop() if len(homes) == 1 else None
        if home is None:
            result |= dict.fromkeys(cluster, _set_name("near", min(cluster)))
        else:
            by_switch[home].append(cluster)
    for switch, members in by_switch.items():
        if sum(map(len, members)) <= MAX_COUNTERS_PER_SET:
            for cluster in members:
                result |= dict.fromkeys(cluster, _set_name("switch", switch))
        else:
            for cluster in members:
                result |= dict.fromkeys(cluster, _set_name("near", min(cluster)))
    return result


def _clusters(shared: Sequence[str], devices: Sequence[OfferedDevice]) -> list[frozenset[str]]:
    """Parts that some device consumes together, transitively."""
    cluster_of = {part: {part} for part in shared}
    for device in devices:
        parts = [part for part in device.gpus + device.nics if part in cluster_of]
        for part in parts[1:]:
            merged = cluster_of[parts[0]] | cluster_of[part]
            for member in merged:
                cluster_of[member] = merged
    unique = {id(cluster): frozenset(cluster) for cluster in cluster_of.values()}
    return list(unique.values())


def _set_name(prefix: str, address: str) -> str:
    return f"{prefix}-{_label(address)}"


def _label(address: str) -> str:
    return address.replace(":", "-").replace(".", "-")
