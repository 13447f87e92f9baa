"""Counter sets: one truth about hardware that is offered under several names.

A GPU is offered alone and as a half of its pair. Both devices consume the GPU's counter, so the scheduler can
hand out only one of them. A GPU that is cut into parts has a unit for each: a part takes one, the whole all.
Hardware that is offered under one name only needs no counter, nor does a NIC that goes nowhere without a GPU
that has one. Limits (k8s.io/api resource/v1): 32 counters a set, a device consumes from at most 2 sets.

Sets are few: the device of all GPUs with their NICs consumes from as many as there are, and each device names those
that it consumes from. One set is enough for most machines, one for GPUs and one for NICs for nearly all others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from railmate.publish.model import Offer, OfferedDevice
from railmate_api import attributes as names

_NODE, _GPUS, _NICS = "node", "gpus", "nics"
MAX_COUNTERS_PER_SET = 32
MAX_SETS_PER_DEVICE = 2


def assign_counters(devices: Sequence[OfferedDevice], switches: Mapping[str, str]) -> Offer:
    """Give every piece of hardware with several names a counter.

    Counters are in one set, else in one of GPUs and one of NICs. Where there are too many for that there is no device
    of the whole node, and they are grouped by switch where a switch's fit into one set; else each cluster of devices
    that share hardware has a set of its own. A cluster that is too large even for that (a GPU with
    dozens of NICs) loses what is made of hardware that pods have under another name, which nobody could get, then
    the devices of its lone NICs, then those of several GPUs, then all. Notes tell what is lost. What pods hold is
    never lost: see `railmate.publish.held`.
    """
    gpus = {gpu for device in devices for gpu in device.gpus}
    notes: tuple[str, ...] = ()
    set_of = _in_two_sets(_shared(devices), gpus)
    if set_of is None:
        devices, notes = _without_crowds(devices)
        set_of = _group(_shared(devices), devices, switches)
    units = _units(devices)
    counter_of = {part: f"{'gpu' if part in gpus else 'vf'}-{_label(part)}" for part in set_of}

    sets: dict[str, dict[str, int]] = defaultdict(dict)
    for part in _shared(devices):
        sets[set_of[part]][counter_of[part]] = units[part]
    counted = [_with_counters(device, set_of, counter_of, units) for device in devices]
    return Offer(tuple(counted), dict(sorted(sets.items())), notes=notes)


def _units(devices: Sequence[OfferedDevice]) -> dict[str, int]:
    """Hardware to how many may have a share of it."""
    parts = Counter(gpu for device in devices if device.partition for gpu in device.gpus)
    return {part: max(1, parts[part]) for device in devices for part in device.gpus + device.nics}


def _shared(devices: Sequence[OfferedDevice]) -> list[str]:
    """Hardware with several names that exclude each other, and no other counter to see to that."""
    users: dict[str, list[OfferedDevice]] = defaultdict(list)
    for device in devices:
        for part in device.gpus + device.nics:
            users[part].append(device)
    return [part for part, held in users.items() if _needs_counter(part, held)]


def _needs_counter(part: str, users: Sequence[OfferedDevice]) -> bool:
    if len(users) < 2 or all(device.partition for device in users) or all(map(_is_held, users)):
        return False
    is_gpu = part in users[0].gpus
    return is_gpu or not any(all(gpu in device.gpus for device in users) for gpu in users[0].gpus)


def _is_held(device: OfferedDevice) -> bool:
    return device.kind == names.KIND_HELD


def _in_two_sets(shared: Sequence[str], gpus: Collection[str]) -> dict[str, str] | None:
    """Hardware address to the name of its counter set. None where two sets are not enough."""
    if len(shared) <= MAX_COUNTERS_PER_SET:
        return dict.fromkeys(shared, _NODE)
    set_of = {part: _GPUS if part in gpus else _NICS for part in shared}
    return set_of if max(Counter(set_of.values()).values()) <= MAX_COUNTERS_PER_SET else None


def _without_crowds(devices: Sequence[OfferedDevice]) -> tuple[list[OfferedDevice], tuple[str, ...]]:
    """Drops devices until each cluster fits into a counter set, and tells which.

    In the end a cluster has but devices that pods hold, and of those none can be given out, so they need no counters.
    """
    held = {part for one in devices if _is_held(one) for part in one.gpus + one.nics}
    kept, notes = [one for one in devices if one.kind != names.KIND_NODE], []
    if len(kept) < len(devices):
        notes.append(
            f"the whole node is not offered as one device: that would need {len(_shared(devices))} counters, and a "
            f"device may consume from {MAX_SETS_PER_DEVICE} sets of {MAX_COUNTERS_PER_SET}"
        )
    for what, droppable in (
        (
            "devices of {parts} are not offered until pods give back what they have of them under other names",
            lambda one: not held.isdisjoint(one.gpus + one.nics),
        ),
        ("NICs of GPU {parts} are offered only in its pair, not alone as well", lambda one: not one.gpus),
        ("groups of GPUs {parts} are not offered", lambda one: len(one.gpus) > 1),
        ("devices of {parts} are not offered", lambda one: True),
    ):
        for cluster in _clusters(_shared(kept), kept):
            if len(cluster) <= MAX_COUNTERS_PER_SET:
                continue
            near = [device for device in kept if not cluster.isdisjoint(device.gpus + device.nics)]
            dropped = {device.name for device in near if droppable(device) and not _is_held(device)}
            if dropped:
                kept = [device for device in kept if device.name not in dropped]
                parts = sorted({gpu for device in near for gpu in device.gpus} or cluster)
                notes.append(
                    f"{len(dropped)} {what.format(parts=', '.join(parts))}: "
                    f"that would need {len(cluster)} counters, and a counter set holds {MAX_COUNTERS_PER_SET}"
                )
    return kept, tuple(notes)


def _with_counters(
    device: OfferedDevice, set_of: Mapping[str, str], counter_of: Mapping[str, str], units: Mapping[str, int]
) -> OfferedDevice:
    consumes = tuple(
        (set_of[part], counter_of[part], 1 if device.partition else units[part])
        for part in device.gpus + device.nics
        if part in set_of
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
            result |= dict.fromkeys(cluster, f"near-{_label(min(cluster))}")
        else:
            by_switch[home].append(cluster)
    for switch, members in by_switch.items():
        if sum(map(len, members)) <= MAX_COUNTERS_PER_SET:
            for cluster in members:
                result |= dict.fromkeys(cluster, f"switch-{_label(switch)}")
        else:
            for cluster in members:
                result |= dict.fromkeys(cluster, f"near-{_label(min(cluster))}")
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


def _label(address: str) -> str:
    return address.replace(":", "-").replace(".", "-")
