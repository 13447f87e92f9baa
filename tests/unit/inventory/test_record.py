"""A recording has all that the topology needs and nothing that is somebody's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from harness.machines import MACHINES, Machine, load_machine, make_vpd, parse_machine, with_vfs
from harness.synthetic import synthetic
from harness.sysfs import write_tree
from railmate.inventory.model import Inventory, PciFunction
from railmate.inventory.record import record
from railmate.inventory.scan import scan
from railmate.topology.analyze import analyze

NAMES = sorted(path.stem for path in MACHINES.glob("*.yaml"))


def tree_of(machine: Machine, root: Path) -> Path:
    root.mkdir()
    write_tree(machine, root)
    return root


def inventory_of(root: Path) -> Inventory:
    return scan(root / "sys", root / "proc")


def recorded(root: Path) -> str:
    return record(root / "sys", root / "proc")


def impersonal(function: PciFunction) -> PciFunction:
    """The function without what a recording leaves out."""
    return replace(
        function,
        vpd=None,
        netdevs=tuple(replace(netdev, mac=None, speed=None, mtu=None) for netdev in function.netdevs),
        rdma_devices=tuple(replace(device, node_guid=None) for device in function.rdma_devices),
    )


def assert_same_machine(before: Inventory, after: Inventory) -> None:
    assert before.functions
    assert list(after.functions) == list(before.functions)
    for address, function in before.functions.items():
        assert impersonal(after.functions[address]) == impersonal(function)
    assert [(nic.address, nic.vf_index) for nic in after.nics] == [
        (nic.address, nic.vf_index) for nic in before.nics
    ]
    facts = [[(g.address, g.index, g.product, g.driver_version) for g in i.gpus] for i in (before, after)]
    assert facts[0] == facts[1]
    assert analyze(after) == analyze(before)


@pytest.mark.parametrize(("name", "vfs"), [*((name, 0) for name in NAMES), ("dgx-a100", 2), ("b200-8gpu", 1)])
def test_a_machine_survives_recording(name: str, vfs: int, tmp_path: Path) -> None:
    path = MACHINES / f"{name}.yaml"
    before = tree_of(load_machine(path, vfs), tmp_path / "before")
    text = recorded(before)
    after = tree_of(parse_machine(yaml.safe_load(text)), tmp_path / "after")
    assert_same_machine(inventory_of(before), inventory_of(after))
    assert recorded(after).partition("\n")[2] == text.partition("\n")[2]


def test_a_recording_without_vfs_is_a_machine_as_the_tests_have_them(tmp_path: Path) -> None:
    text = recorded(tree_of(load_machine(MACHINES / "dgx-a100.yaml"), tmp_path / "before"))
    machine = parse_machine(yaml.safe_load(text))
    assert len(machine.functions) == 281
    assert len(machine.gpus) == 8


ODD = """
pci0000:00 numa=0
  00:01.1 port
    01:00.0 gpu minor=1
    01:00.1 nic rdma=mlx5_0 net=enp1s0f1np0
pci10000:e0 numa=-1
  e0:01.1 port
    e1:00.0 gpu minor=0
pci0002:00 numa=8
  00:01.0 dma numa=1 driver=- vpd.V3=SERIAL-1
  00:02.0 nic rdma=mlx5_1 vfs=5 driver=vfio-pci vpd.V3=SERIAL-1
  00:03.0 nic rdma=mlx5_2 vpd.V3=SERIAL-2 vpd.VU=SMDL=SW_MNG
"""


def test_odd_machines_survive_recording(tmp_path: Path) -> None:
    """A domain of five digits, minor numbers out of order, nodes that differ below a host bridge, VPD."""
    before = tree_of(replace(synthetic(ODD), nvidia_driver="550.54.15"), tmp_path / "before")
    after = tree_of(parse_machine(yaml.safe_load(recorded(before))), tmp_path / "after")
    assert_same_machine(inventory_of(before), inventory_of(after))
    assert [gpu.index for gpu in inventory_of(after).gpus] == [1, 0]


def test_a_rate_that_is_not_the_models_is_kept(tmp_path: Path) -> None:
    """Which NIC is a rail can hang on it."""
    tree = (
        "pci0000:00 numa=0\n  00:01.0 nic rdma=mlx5_0\n  00:02.0 nic rdma=mlx5_1\n  00:03.0 nic rdma=mlx5_2"
    )
    machine = synthetic(tree)
    functions = dict(machine.functions)
    for address, rate in zip(functions, (400, 400, 100), strict=True):
        (device,) = functions[address].rdma_devices
        functions[address] = replace(functions[address], rdma_devices=(replace(device, rate=rate),))
    before = tree_of(replace(machine, functions=functions), tmp_path / "before")
    after = tree_of(parse_machine(yaml.safe_load(recorded(before))), tmp_path / "after")
    rates = [f.rdma_devices[0].rate for f in inventory_of(after).functions.values()]
    assert rates == [400, 400, 100]


def test_a_vf_keeps_its_index_where_another_is_missing(tmp_path: Path) -> None:
    machine = synthetic("pci0000:00 numa=0\n  00:01.0 nic rdma=mlx5_0 net=enp0s1np0")
    models = {"15b3:1021": {"driver": "mlx5_core", "vf": "15b3:101e"}}
    before = tree_of(with_vfs(machine, ["0000:00:01.0"], 3, models), tmp_path / "before")
    (before / "sys/bus/pci/devices/0000:00:01.0").resolve().joinpath("virtfn1").unlink()
    text = recorded(before)
    assert re.findall(r"\bvf=(\d)", text) == ["0", "2"]
    assert "warnings while it was read: 1" in text


def test_a_function_whose_rdma_device_is_in_a_pod_still_does_rdma(tmp_path: Path) -> None:
    machine = synthetic("pci0000:00 numa=0\n  00:01.0 nic rdma=mlx5_0 net=enp0s1np0")
    before = tree_of(machine, tmp_path / "before")
    directory = (before / "sys/bus/pci/devices/0000:00:01.0").resolve()
    (directory / "infiniband").rename(tmp_path / "away")
    assert inventory_of(before).functions["0000:00:01.0"].rdma_devices == ()
    after = tree_of(parse_machine(yaml.safe_load(recorded(before))), tmp_path / "after")
    assert inventory_of(after).functions["0000:00:01.0"].has_rdma


SECRETS = {
    "MAC": "a0:88:c2:12:34:56",
    "MAC in a name": "a088c2123456",
    "GUID": "a088:c203:0012:3456",
    "GUID in a name": "a088c20300123456",
    "serial": "MT2345X67890",
    "UUID": "GPU-5e9a1c22-1111-2222-3333-444455556666",
    "somebody's word": "acme",
    "VMBus GUID": "47505500-0001-0000-3130-444531303344",
}


def secret_machine(root: Path) -> None:
    tree = """
    pci0000:00 numa=0
      00:01.0 gpu
      00:02.0 nic rdma=rocexa088c20300123456 net=enxa088c2123456 mac=a0:88:c2:12:34:56 vpd.V3=MT2345X67890
      00:03.0 dma vpd.V3=MT2345X67890
      00:04.0 nic rdma=acme_fabric net=acme0
      00:05.0 nic rdma=mlx5_4 net=acme-uplink,enp0s5np0
    """
    machine = synthetic(tree)
    functions = dict(machine.functions)
    odd = functions["0000:00:02.0"]
    devices = tuple(replace(d, node_guid="a088:c203:0012:3456") for d in odd.rdma_devices)
    vpd = make_vpd({"SN": "MT2345X67890", "V3": "MT2345X67890"})
    functions["0000:00:02.0"] = replace(odd, rdma_devices=devices, vpd=vpd)
    gpu = functions["0000:00:01.0"]
    path = ("LNXSYSTM:00", "VMBUS:00", SECRETS["VMBus GUID"], "pci0000:00", "0000:00:01.0")
    functions["0000:00:01.0"] = replace(gpu, path=path)
    gpus = {a: replace(facts, uuid=SECRETS["UUID"]) for a, facts in machine.gpus.items()}
    write_tree(replace(machine, functions=functions, gpus=gpus, nvidia_driver="550.54.15"), root)


def test_what_is_somebodys_is_not_in_a_recording(tmp_path: Path) -> None:
    secret_machine(tmp_path)
    inventory = inventory_of(tmp_path)
    known = str(inventory)
    for what, secret in SECRETS.items():
        assert secret in known, f"the test's machine has no {what}"
    text = recorded(tmp_path)
    for what, secret in SECRETS.items():
        assert secret.lower() not in text.lower(), what
    assert text == recorded(tmp_path)


def test_stand_ins_are_the_same_wherever_a_thing_occurs(tmp_path: Path) -> None:
    secret_machine(tmp_path)
    text = recorded(tmp_path)
    identifiers = re.findall(r"vpd\.V3=(\S+)", text)
    assert len(identifiers) == 2
    assert len(set(identifiers)) == 1
    names = re.findall(r"net=(\S+)", text)
    assert len(names) == 3
    assert len({name for group in names for name in group.split(",")}) == 4
    assert "enp0s5np0" in text  # a name that says no more than the address is kept


@pytest.mark.parametrize(
    "name",
    ["eth0", "eno1", "enp12s0np0", "enP5p1s0f1np1", "ens1f0", "ibp12s0", "ibs3", "hsn0", "enp12s0f0v3"],
)
def test_usual_names_of_netdevs_are_kept(name: str, tmp_path: Path) -> None:
    write_tree(synthetic(f"pci0000:00\n  00:01.0 nic net={name}"), tmp_path)
    assert f"net={name}\n" in recorded(tmp_path)


@pytest.mark.parametrize("name", ["mlx5_0", "mlx5_bond_0", "rdmap79s0", "rocep12s0f1", "ibp3s0", "bnxt_re3"])
def test_usual_names_of_rdma_devices_are_kept(name: str, tmp_path: Path) -> None:
    write_tree(synthetic(f"pci0000:00\n  00:01.0 nic rdma={name}"), tmp_path)
    assert f"rdma={name}\n" in recorded(tmp_path)


def test_the_machine_that_runs_the_tests_can_be_recorded(tmp_path: Path) -> None:
    """Whatever it is: its live /sys gives a file that reads back to the same PCI tree."""
    if not Path("/sys/bus/pci/devices").is_dir() or not list(Path("/sys/bus/pci/devices").iterdir()):
        pytest.skip("this machine has no PCI devices")
    text = record()
    machine = parse_machine(yaml.safe_load(text))
    assert list(machine.functions) == list(scan().functions)
    for mac in Path("/sys/class/net").glob("*/address"):
        value = mac.read_text().strip()
        assert not value.strip("0:") or value not in text
    write_tree(machine, tmp_path)
    assert analyze(scan(tmp_path / "sys", tmp_path / "proc")).machine_class == analyze(scan()).machine_class
