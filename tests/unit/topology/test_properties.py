"""What holds for every tree, tried on random ones."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.machines import Machine, with_vfs
from harness.synthetic import inventory_of, switch, synthetic
from railmate.inventory.model import Gpu, GpuVendor, Inventory, Nic, PciFunction
from railmate.topology.analyze import analyze
from railmate.topology.distance import distance
from railmate.topology.matching import match
from railmate.topology.model import Distance, MachineClass, Role, Source, Topology
from railmate.topology.ncclfile import NcclFileError, parse_nccl_topology
from railmate.topology.tree import place
from railmate_api.override import (
    OverridePair,
    OverrideSwitch,
    RoleRule,
    TopologyOverride,
    check_override,
)

_MODELS = {"15b3:1021": {"driver": "mlx5_core", "vf": "15b3:101e", "vfs": 8}}


@dataclass
class _Switch:
    kind: str
    below: list[_Switch | str]


def _switches() -> st.SearchStrategy[_Switch]:
    leaf = st.sampled_from(["gpu", "nic", "nvme"])
    return st.recursive(
        st.builds(_Switch, st.sampled_from(["port", "gen4"]), st.lists(leaf, min_size=1, max_size=4)),
        lambda inner: st.builds(
            _Switch,
            st.sampled_from(["port", "gen4"]),
            st.lists(st.one_of(leaf, inner), min_size=1, max_size=3),
        ),
        max_leaves=4,
    )


def _hosts() -> st.SearchStrategy[list[tuple[int, list[_Switch | str]]]]:
    roots = st.lists(st.one_of(st.sampled_from(["gpu", "nic"]), _switches()), max_size=3)
    return st.lists(st.tuples(st.integers(-1, 2), roots), min_size=1, max_size=3)


def _tree(hosts: list[tuple[int, list[_Switch | str]]], first_bus: int = 1) -> str:
    """Host bridges with root ports, each leading to a device or a switch; buses count up."""
    lines: list[str] = []
    bus = first_bus
    rdma = 0

    def hang(item: _Switch | str, depth: int) -> None:
        nonlocal bus, rdma
        pad = "  " * depth
        here = bus
        bus += 1
        if isinstance(item, str):
            lines.append(
                f"{pad}{here:02x}:00.0 {item}" + (f" rdma=mlx5_{rdma} net=eth{rdma}" if item == "nic" else "")
            )
            rdma += item == "nic"
            return
        lines.append(f"{pad}{here:02x}:00.0 {item.kind}")
        inner = bus
        bus += 1
        for port, below in enumerate(item.below):
            lines.append(f"{pad}  {inner:02x}:{port:02x}.0 {item.kind}")
            hang(below, depth + 2)

    for domain, (numa, roots) in enumerate(hosts):
        lines.append(f"pci{domain:04x}:00 numa={numa}")
        for port, root in enumerate(roots):
            lines.append(f"  00:{port + 1:02x}.0 port")
            hang(root, 2)
    return "\n".join(lines)


machines = _hosts().map(lambda hosts: synthetic(_tree(hosts)))


def topology_of(machine: Machine) -> Topology:
    return analyze(inventory_of(machine))


@settings(max_examples=150, deadline=None)
@given(machines)
def test_the_class_of_two_devices_is_the_same_both_ways(machine: Machine) -> None:
    devices = [f for f in machine.functions.values() if f.class_code >> 16 != 0x06]
    for one in devices:
        for other in devices:
            there = distance(place(one), place(other), one.numa_node, other.numa_node)
            assert there is distance(place(other), place(one), other.numa_node, one.numa_node)


@settings(max_examples=150, deadline=None)
@given(machines)
def test_a_pair_books_nothing_twice_and_never_leaves_its_switch(machine: Machine) -> None:
    topology = topology_of(machine)
    gpus = [gpu for pair in topology.pairs for gpu in pair.gpus]
    nics = [nic for pair in topology.pairs for nic in pair.nics]
    assert len(gpus) == len(set(gpus))
    assert len(nics) == len(set(nics))
    paths = {(path.gpu, path.nic): path for path in topology.paths}
    assert all(topology.roles[nic] is Role.RAIL for nic in nics)
    if topology.machine_class is MachineClass.SWITCHED:
        by_switch = [pair for pair in topology.pairs if pair.source is not Source.NUMA]
        assert by_switch
        assert all(paths[g, n].pcie_switch for pair in by_switch for g in pair.gpus for n in pair.nics)
        sharing = {path.gpu for path in topology.paths if path.pcie_switch}
        assert {gpu for pair in by_switch for gpu in pair.gpus} == sharing
        rest = [pair for pair in topology.pairs if pair not in by_switch]
        assert all(paths[g, n].distance is not Distance.PIX for p in rest for g in p.gpus for n in p.nics)
    else:
        assert not topology.switches


@settings(max_examples=100, deadline=None)
@given(machines)
def test_the_same_inventory_gives_the_same_answer_in_whatever_order_it_comes(machine: Machine) -> None:
    inventory = inventory_of(machine)
    backwards = replace(inventory, functions=dict(reversed(list(inventory.functions.items()))))
    assert analyze(inventory) == analyze(backwards)


@settings(max_examples=100, deadline=None)
@given(_hosts(), st.integers(2, 40))
def test_other_bus_numbers_change_nothing_but_names(
    hosts: list[tuple[int, list[_Switch | str]]], first: int
) -> None:
    one, other = synthetic(_tree(hosts)), synthetic(_tree(hosts, first))
    renamed = dict(zip(one.functions, other.functions, strict=True))
    before, after = topology_of(one), topology_of(other)
    assert [(renamed[p.gpu], renamed[p.nic], p.distance) for p in before.paths] == [
        (p.gpu, p.nic, p.distance) for p in after.paths
    ]
    assert {renamed[a]: renamed[switch] for a, switch in before.switches.items()} == after.switches
    assert [[renamed[a] for a in (*p.gpus, *p.nics)] for p in before.pairs] == [
        [*p.gpus, *p.nics] for p in after.pairs
    ]


@settings(max_examples=100, deadline=None)
@given(machines, st.sampled_from(["nvme", "ethernet", "vga", "bridge"]))
def test_a_device_elsewhere_that_is_no_gpu_and_no_rail_changes_nothing(machine: Machine, what: str) -> None:
    extra = synthetic(f"pciffff:00 numa=7\n  00:01.0 port\n    01:00.0 {what}")
    before = topology_of(machine)
    after = topology_of(replace(machine, functions={**machine.functions, **extra.functions}))
    assert before.pairs == after.pairs
    assert before.switches == after.switches
    assert before.machine_class is after.machine_class
    assert before.paths == tuple(path for path in after.paths if not path.nic.startswith("ffff"))


@settings(max_examples=100, deadline=None)
@given(machines)
def test_a_further_switch_with_a_gpu_and_a_nic_changes_nothing_for_the_others(machine: Machine) -> None:
    before = topology_of(machine)
    assume(before.machine_class is MachineClass.SWITCHED)
    extra = synthetic(switch(0, "gpu", "nic rdma=mlx5_99", domain="ffff", numa=7))
    after = topology_of(
        replace(
            machine, functions={**machine.functions, **extra.functions}, gpus={**machine.gpus, **extra.gpus}
        )
    )
    assert after.pairs[:-1] == before.pairs
    assert after.pairs[-1].gpus == ("ffff:03:00.0",)
    assert after.switches.items() >= before.switches.items()
    assert after.rails.items() >= before.rails.items()
    assert set(after.paths) >= set(before.paths)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_a_matching_is_even_complete_and_the_nearest_of_all(
    gpus: int, cards: int, data: st.DataObject
) -> None:
    """Against every assignment there is: none with loads as even has less distance in sum."""
    costs = data.draw(
        st.lists(st.lists(st.integers(0, 9), min_size=cards, max_size=cards), min_size=gpus, max_size=gpus)
    )
    few, many = sorted((gpus, cards))

    def cost(gpu: str, card: str) -> int:
        return costs[int(gpu)][int(card)]

    result = match([str(i) for i in range(gpus)], [str(i) for i in range(cards)], cost)
    for side, count in ((0, gpus), (1, cards)):
        held = [one for unit in result for one in unit[side]]
        assert sorted(held, key=int) == [str(i) for i in range(count)]
    loads = [max(len(unit[0]), len(unit[1])) for unit in result]
    assert len(loads) == few
    assert max(loads) - min(loads) <= 1
    found = sum(cost(gpu, card) for unit in result for gpu in unit[0] for card in unit[1])
    matrix = costs if gpus >= cards else [list(row) for row in zip(*costs, strict=True)]
    assert found == _least(matrix, many, few)


def _least(matrix: list[list[int]], many: int, few: int) -> int:
    """The least sum over all assignments with even loads, column loads tracked as a tuple."""
    base, extra = divmod(many, few)
    states = {(0,) * few: 0}
    for row in matrix:
        following: dict[tuple[int, ...], int] = {}
        for loads, total in states.items():
            for column in range(few):
                after = (*loads[:column], loads[column] + 1, *loads[column + 1 :])
                if after[column] <= base + bool(extra) and sum(load > base for load in after) <= extra:
                    following[after] = min(following.get(after, total + row[column]), total + row[column])
        states = following
    return min(states.values())


_ROLES = st.sampled_from(["rail", "management", "storage", "other"])


@settings(max_examples=100, deadline=None)
@given(machines, st.data())
def test_no_override_however_odd_books_twice_or_raises(machine: Machine, data: st.DataObject) -> None:
    addresses = [*machine.functions, "0000:fe:00.0"]
    one = st.sampled_from(addresses)
    ids = data.draw(st.lists(st.sampled_from(["a", "b", addresses[0]]), unique=True, max_size=3))
    shuffled = data.draw(st.permutations(addresses))
    override = TopologyOverride(
        switches=tuple(
            OverrideSwitch(name, tuple(shuffled[index :: len(ids)]), ids[index - 1] if index else None)
            for index, name in enumerate(ids)
        ),
        numa_nodes=data.draw(st.dictionaries(one, st.integers(-1, 2), max_size=4)),
        roles=tuple(
            RoleRule(data.draw(_ROLES), address=data.draw(one)) for _ in range(data.draw(st.integers(0, 3)))
        ),
        rails=data.draw(st.dictionaries(one, st.integers(0, 9), max_size=3)),
        pairs=(OverridePair((data.draw(one),), (data.draw(one),)),),
    )
    check_override(override)
    topology = analyze(inventory_of(machine), override)
    for side in (0, 1):
        held = [address for pair in topology.pairs for address in (pair.gpus, pair.nics)[side]]
        assert len(held) == len(set(held))
    assert all(topology.roles[nic] is Role.RAIL for pair in topology.pairs for nic in pair.nics)
    assert topology.machine_class is topology_of(machine).machine_class or override.roles or override.pairs


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=200)
    | st.text(alphabet='<>/= "pcisystemuadn:0123456789&;![]', max_size=200).map(str.encode)
)
def test_no_text_however_odd_makes_the_nccl_reader_raise_anything_but_its_error(text: bytes) -> None:
    with suppress(NcclFileError):
        parse_nccl_topology(text)


@settings(max_examples=75, deadline=None)
@given(machines, st.integers(1, 4))
def test_a_vf_is_where_its_physical_function_is(machine: Machine, count: int) -> None:
    nics = [a for a, function in machine.functions.items() if function.rdma_devices]
    inventory = inventory_of(with_vfs(machine, nics, count, _MODELS))
    topology = analyze(inventory)
    vfs = [nic for nic in inventory.nics if nic.is_vf]
    assert len(vfs) == count * len(nics)
    assert topology.pairs == topology_of(machine).pairs
    for vf in vfs:
        pf = vf.function.physical_function or ""
        assert topology.roles[vf.address] is topology.roles[pf]
        assert topology.switches.get(vf.address) == topology.switches.get(pf)
        assert topology.rails.get(vf.address) == topology.rails.get(pf)


_ODD = ["pci0000:00", "0000:00:01.0", "0000:01:00.0", "virtual", "0000:02:00.0", ""]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.sampled_from(_ODD), max_size=5), max_size=6))
def test_no_path_however_odd_raises(paths: list[list[str]]) -> None:
    functions, gpus, nics = {}, [], []
    for index, path in enumerate(paths):
        address = f"0000:{index + 16:02x}:00.0"
        function = PciFunction(
            address, (*path, address), 0x020000, 0x15B3, 0x1021, auxiliary=("mlx5_core.rdma.0",)
        )
        functions[address] = function
        if index % 2:
            gpus.append(Gpu(function, GpuVendor.NVIDIA))
        else:
            nics.append(Nic(function))
    topology = analyze(Inventory(functions=functions, gpus=tuple(gpus), nics=tuple(nics)))
    assert len(topology.paths) == len(gpus) * len(nics)
