"""What is wanted, checked, as requests and constraints in the form and order that cost the scheduler least.

Why this form: the allocator tries every combination, so a constraint for each GPU with its NIC takes it past its 10 s
where the answer is no, and then the pod is given up on all nodes; one request for n pair devices is answered at once.
It fills the requests in their order, so the scarcest comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from railmate.errors import UsageError
from railmate_api import attributes as names

#: Devices in one claim (k8s.io/api resource/v1, AllocationResultsMaxSize), and alternatives of one request.
MAX_DEVICES: Final = 32
_MAX_LABEL: Final = 63  # DNS label, as a request's name is
#: Where a pair may come from when there is none on a switch: word of --fallback to class.
FALLBACKS: Final = {"numa": names.CLASS_PAIR_NUMA, "any": names.CLASS_PAIR_ANY}


@dataclass(frozen=True, slots=True)
class Ask:
    """The words of ``railmate claim``. ``classes``: further classes and how many of each. ``rails``: of the pairs.
    ``whole_node``: the pairs are all that a node has. ``counted``: by Kueue, which takes only requests of a class and a
    number: with selectors, constraints or alternatives the workload is never admitted (Kueue 0.17)."""

    pairs: int | None = None
    gpus: int | None = None
    vfs: int | None = None
    groups: int | None = None
    group_gpus: int | None = None
    classes: tuple[tuple[str, int], ...] = ()
    same_switch: bool = False
    rail_aligned: bool = False
    rails: tuple[int, ...] = ()
    fallback: tuple[str, ...] = ()
    whole_node: bool = False
    counted: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """``devices``: spec.devices of a claim. ``why``: sentences for whoever reads the YAML. ``gpus``: the most that the
    claim may bring."""

    devices: dict[str, Any]
    why: tuple[str, ...]
    gpus: int = 0


def compose(ask: Ask) -> Spec:
    """Raises UsageError for what no scheduler could do, or what contradicts itself."""
    _check(ask)
    requests: list[dict[str, Any]] = []
    why: list[str] = []
    pairs, gpus, vfs = ask.pairs or 0, ask.gpus or 0, ask.vfs or 0
    if ask.same_switch and not ask.pairs:
        pairs, gpus, vfs = _paired(gpus, vfs)
        if pairs:
            why.append(
                "GPU and VF are asked for as pair devices: they share a switch by themselves, and a matchAttribute for "
                "each GPU with its NIC takes the scheduler past its time-out where the answer is no."
            )
    if ask.groups:
        requests.append(_request("groups", names.CLASS_GROUP, ask.groups, _group_selectors(ask)))
        why.append("A group is some GPUs with the NICs that are theirs together: one device, no constraint.")
    if pairs:
        requests += _pairs(ask, pairs)
        why += _about_pairs(ask, pairs)
    requests += [_request(_label(name), name, count) for name, count in ask.classes]
    first_class = len(requests) - len(ask.classes)
    if gpus:
        requests.append(_request("gpus", names.CLASS_GPU, gpus))
    if vfs:
        requests.append(_request("vfs", names.CLASS_RDMA_VF, vfs))
    _number_repeats(requests, range(first_class, first_class + len(ask.classes)))
    if len(requests) > 1:
        why.append(
            "The scarcest request comes first: the scheduler fills them in this order, and fails early."
        )
    if gpus and vfs and not ask.same_switch:
        why.append(
            "Nothing ties these GPUs to these VFs: which of them are close is luck. --same-switch or --pairs tie them."
        )
    devices: dict[str, Any] = {"requests": requests}
    if ask.same_switch:
        devices["constraints"] = [
            {"requests": [one["name"] for one in requests], "matchAttribute": names.PCIE_SWITCH}
        ]
        why.append(
            "One constraint holds all of it under one switch; it is cheap, as the pairs are whole devices."
        )
    return Spec(devices, tuple(why), pairs + gpus + (ask.groups or 0) * (ask.group_gpus or 1))


def class_names(spec: Spec) -> list[str]:
    """All classes that the claim names, each once."""
    found = [body["deviceClassName"] for one in spec.devices["requests"] for body in _bodies(one)]
    return list(dict.fromkeys(found))


def _bodies(request: dict[str, Any]) -> Sequence[dict[str, Any]]:
    return request["firstAvailable"] if "firstAvailable" in request else (request["exactly"],)


# --- what cannot be
def _check(ask: Ask) -> None:
    for error in _contradictions(ask):
        raise UsageError(error)


def _contradictions(ask: Ask) -> Iterator[str]:
    counts = {"--pairs": ask.pairs, "--gpus": ask.gpus, "--vfs": ask.vfs, "--groups": ask.groups}
    counts |= {f"--class {name}": count for name, count in ask.classes}
    counts["--gpus-per-group"] = ask.group_gpus
    for flag, count in counts.items():
        if count is not None and count < 1:
            yield f"{flag} {count}: must be 1 or more. Leave the flag out for none."
    total = sum(count or 0 for flag, count in counts.items() if flag != "--gpus-per-group")
    if total == 0:
        yield "nothing is asked for. Give --pairs N, or --gpus N and --vfs M, --groups N or --class CLASS=N."
    if total > MAX_DEVICES:
        yield (
            f"{total} devices: a claim holds {MAX_DEVICES} at most, and all of them come from one node. Ask for what "
            "one node has, and run as many pods as it takes (--for job makes them)."
        )
    if ask.fallback and not ask.pairs:
        yield "--fallback is about pairs: give --pairs N with it."
    for word in ask.fallback:
        if word not in FALLBACKS:
            yield f"--fallback {word}: only {' and '.join(FALLBACKS)} are known, in the order in which they are tried."
    if len(set(ask.fallback)) < len(ask.fallback):
        yield "--fallback names an alternative twice: the second would never be tried."
    if ask.fallback and ask.same_switch:
        yield "--fallback and --same-switch contradict each other: what is not on a switch is not on the same one."
    if (ask.rail_aligned or ask.rails) and not ask.pairs:
        yield "--rail-aligned is about pairs: give --pairs N with it."
    if ask.rails and len(ask.rails) != ask.pairs:
        yield f"--rails names {len(ask.rails)} rails for {ask.pairs} pairs: give one for each."
    if ask.same_switch and ask.groups:
        yield "--same-switch and --groups: a group is already what shares NICs. Leave --same-switch out."
    if ask.same_switch and total < 2:
        yield "--same-switch needs two devices or more; a pair alone is on one switch anyway."
    if ask.group_gpus and not ask.groups:
        yield "--gpus-per-group is about groups: give --groups N with it."
    others = ask.gpus or ask.groups or ask.same_switch or ask.fallback or ask.rail_aligned or ask.rails
    if ask.whole_node and (not ask.pairs or others):
        yield "--whole-node goes with --pairs N alone: it is all GPUs of a node, each with its NIC on its switch."
    for flag, given, way in (
        ("--whole-node", ask.whole_node, "leave it out: --pairs N takes the same devices"),
        ("--same-switch", ask.same_switch, "ask for --pairs N, each of which is on one switch"),
        ("--rails", ask.rails, "leave it out: a pod with all pairs of a node has all rails"),
        ("--rail-aligned", ask.rail_aligned, "leave it out: a pod with all pairs of a node has all rails"),
        ("--fallback", ask.fallback, "ask for --class CLASS=N of the one class that the machines have"),
        ("--gpus-per-group", ask.group_gpus, "leave it out, or make a DeviceClass of it for --class"),
    ):
        if ask.counted and given:
            yield (
                f"{flag} and --for kueue: Kueue counts only requests of a class and a number, and would never admit "
                f"it. For Kueue {way}; or use --for job."
            )
    own = {names.CLASS_PAIR: "--pairs", names.CLASS_GPU: "--gpus", names.CLASS_RDMA_VF: "--vfs"}
    own[names.CLASS_GROUP] = "--groups"
    for name, _ in ask.classes:
        if name in own:
            yield f"--class {name}: use {own[name]} for it."
    if len({name for name, _ in ask.classes}) < len(ask.classes):
        yield "--class names a class twice: give it once, with the sum."


# --- requests
def _paired(gpus: int, vfs: int) -> tuple[int, int, int]:
    """As many pairs as can be, and what is over of either."""
    pairs = min(gpus, vfs)
    return pairs, gpus - pairs, vfs - pairs


def _request(name: str, device_class: str, count: int, selectors: Sequence[str] = ()) -> dict[str, Any]:
    return {"name": name, "exactly": _exactly(device_class, count, selectors)}


def _exactly(device_class: str, count: int, selectors: Sequence[str] = ()) -> dict[str, Any]:
    body: dict[str, Any] = {"deviceClassName": device_class, "count": count}
    if selectors:
        body["selectors"] = [{"cel": {"expression": expression}} for expression in selectors]
    return body


def can_be_whole_node(ask: Ask) -> bool:
    """Whether the same may be asked for with ``whole_node``."""
    return bool(ask.pairs) and next(_contradictions(replace(ask, whole_node=True)), None) is None


def rails_of(ask: Ask) -> Sequence[int]:
    """The rails that are asked for, none where any will do."""
    return ask.rails or (range(ask.pairs or 0) if ask.rail_aligned else ())


def _pairs(ask: Ask, count: int) -> list[dict[str, Any]]:
    if ask.whole_node:
        return [_request("node", names.CLASS_NODE, 1, [_gpu_count(count)])]
    if rails := rails_of(ask):
        # one request with a count would take two pairs of one rail where GPUs share a NIC
        return [_pair_request(ask, f"rail-{rail}", 1, [_on_rail(rail)]) for rail in rails]
    return [_pair_request(ask, "pairs", count, [])]


def _pair_request(ask: Ask, request: str, count: int, selectors: Sequence[str]) -> dict[str, Any]:
    if not ask.fallback:
        return _request(request, names.CLASS_PAIR, count, selectors)
    alternatives = [("switch", names.CLASS_PAIR), *((word, FALLBACKS[word]) for word in ask.fallback)]
    return {
        "name": request,
        "firstAvailable": [{"name": word, **_exactly(name, count, selectors)} for word, name in alternatives],
    }


def _about_pairs(ask: Ask, count: int) -> Iterator[str]:
    if ask.whole_node:
        yield (
            f"All {count} GPUs of a node, each with its NIC, are one device: where the answer is no, the scheduler "
            f"has tried one device a node, not each choice of {count} pairs."
        )
    elif ask.fallback:
        yield "The alternatives are tried in this order; the pod sees in its device metadata which it got."
    elif ask.pairs:
        yield "A pair device is a GPU and its NIC under one PCIe switch: one request with a count, no constraint."
    if rails_of(ask):
        yield (
            "A request for each rail, by pairRail (where it is not said: rail): the NIC of request rail-0 is on the "
            "same rail in all pods made from this. Two of them fit on a node only with other --rails, or where GPUs "
            "share a rail."
        )


def _on_rail(rail: int) -> str:
    of_pairs, of_all = (
        f'device.attributes["{names.DOMAIN}"].?{name.partition("/")[2]}'
        for name in (names.PAIR_RAIL, names.RAIL)
    )
    return f"{of_pairs}.or({of_all}).orValue(-1) == {rail}"


def _group_selectors(ask: Ask) -> list[str]:
    return [_gpu_count(ask.group_gpus)] if ask.group_gpus else []


def _gpu_count(count: int) -> str:
    bare = names.GPU_COUNT.partition("/")[2]
    return f'device.attributes["{names.DOMAIN}"].?{bare}.orValue(0) == {count}'


def _number_repeats(requests: list[dict[str, Any]], of_classes: range) -> None:
    """The API refuses two requests of one name; those of further classes give way."""
    names_taken = {one["name"] for place, one in enumerate(requests) if place not in of_classes}
    for place in of_classes:
        base = name = requests[place]["name"]
        number = 1
        while name in names_taken:
            number += 1
            name = f"{base[: _MAX_LABEL - len(f'-{number}')].rstrip('-')}-{number}"
        names_taken.add(name)
        requests[place]["name"] = name


def _label(device_class: str) -> str:
    """A request's name, which is a DNS label, from a class's."""
    return device_class.partition(".")[0][:_MAX_LABEL].strip("-") or "devices"
