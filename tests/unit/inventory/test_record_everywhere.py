"""A recording of any machine gives a tree of which railmate says the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.known import KNOWN
from harness.layouts import LAYOUTS
from harness.machines import MACHINES, Machine, load_machine, parse_machine
from harness.synthetic import inventory_of, switch, synthetic
from harness.sysfs import write_tree
from railmate.inventory.record import record
from railmate.inventory.scan import scan
from railmate.topology.analyze import analyze
from railmate.topology.render.document import document

EVERY: dict[str, Callable[[], Machine]] = {
    **{path.stem: (lambda path=path: load_machine(path)) for path in MACHINES.glob("*.yaml")},
    "dgx-a100 with VFs": lambda: load_machine(MACHINES / "dgx-a100.yaml", vfs_per_rail=2),
    **{name: (lambda name=name: KNOWN[name]) for name in KNOWN},
    **LAYOUTS,
}


def said(root: Path) -> dict[str, Any]:
    """The JSON document without what a recording replaces: names and UUIDs, of which it keeps how many there are."""
    inventory = scan(root / "sys", root / "proc")
    text = document(inventory, analyze(inventory))
    del text["warnings"]  # they name files of the tree
    for gpu in text["gpus"]:
        gpu["uuid"] = gpu["uuid"] is not None
    for nic in text["nics"]:
        nic["rdmaDevices"], nic["netdevs"] = len(nic["rdmaDevices"]), len(nic["netdevs"])
    return text


def assert_recording_says_the_same(machine: Machine, tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    write_tree(machine, before)
    write_tree(parse_machine(yaml.safe_load(record(before / "sys", before / "proc"))), after)
    expected = said(before)
    assert expected["gpus"] or expected["nics"]
    assert said(after) == expected


@pytest.mark.parametrize("name", EVERY)
def test_a_recording_of_every_machine_says_the_same(name: str, tmp_path: Path) -> None:
    assert_recording_says_the_same(EVERY[name](), tmp_path)


HEAD = "pci0000:00 numa=0\n  00:01.0 port\n    01:00.0 port\n"


def beside_a_gpu(*nics: str) -> Machine:
    lines = ["      02:00.0 port", "        03:00.0 gpu"]
    for number, nic in enumerate(nics, 1):
        lines += [f"      02:{number:02x}.0 port", f"        {3 + number:02x}:00.0 {nic} net=n{number}"]
    return synthetic(HEAD + "\n".join(lines))


@pytest.mark.parametrize(
    "nics",
    [
        ("020000 15b3:1021 ? rdma=mlx5_0", "nic rdma=mlx5_1"),
        ("020000 15b3:1021 ? rdma=mlx5_0 vpd.PN=X", "nic rdma=mlx5_1"),
        ("nic rdma=mlx5_0 rate=400", "bnxt rdma=mlx5_1 rate=100 state=DOWN"),
        ("nic rdma=mlx5_0 rate=400", "nic rdma=mlx5_1 rate=-", "bnxt rdma=mlx5_2 rate=100"),
        ("efa rdma=a link=-", "efa rdma=b link=- state=-"),
        ("nic rdma=mlx5_0 card=x", "nic rdma=mlx5_1 card=x"),
        ("nic rdma=mlx5_0 bond=storage0", "nic rdma=mlx5_1 bond=storage0"),
    ],
)
def test_what_decides_about_a_nic_is_in_the_recording(nics: tuple[str, ...], tmp_path: Path) -> None:
    assert_recording_says_the_same(beside_a_gpu(*nics), tmp_path)


def test_that_a_link_was_down_is_in_the_recording(tmp_path: Path) -> None:
    """Its rate says nothing then, and another model with that rate would be no rail."""
    machine = synthetic("\n".join([switch(0, "gpu", "nic"), switch(0x20, "gpu", "bnxt rate=10 state=DOWN")]))
    assert len(analyze(inventory_of(machine)).pairs) == 2
    assert_recording_says_the_same(machine, tmp_path)


def test_a_gpu_that_its_driver_does_not_hold_has_no_number_after_recording_either(tmp_path: Path) -> None:
    machine = synthetic(HEAD + "      02:00.0 port\n        03:00.0 gpu minor=- driver=vfio-pci")
    assert_recording_says_the_same(replace(machine, nvidia_driver="550.54.15"), tmp_path)


def test_drm_nodes_that_do_not_count_from_the_first_are_kept(tmp_path: Path) -> None:
    machine = synthetic(HEAD + "      02:00.0 port\n        03:00.0 mi300x drm=renderD136,card9")
    assert_recording_says_the_same(machine, tmp_path)


_WORDS = st.builds(
    " ".join,
    st.tuples(
        st.sampled_from(["nic", "bnxt", "cx6", "dpu", "020000 15b3:1021 ?"]),
        st.sampled_from(["rdma=x{0}", "rdma=x{0} rate=100", "rdma=x{0} rate=-", ""]),
        st.sampled_from(["", "state=DOWN", "state=-"]),
        st.sampled_from(["", "link=InfiniBand", "link=-"]),
        st.sampled_from(["", "card=a", "card=b"]),
        st.sampled_from(["", "bond=b0", "bond=b1"]),
    ),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(_WORDS, min_size=1, max_size=5))
def test_any_mixture_of_nics_survives_recording(
    tmp_path_factory: pytest.TempPathFactory, nics: list[str]
) -> None:
    named = [nic.format(number) for number, nic in enumerate(nics)]
    assert_recording_says_the_same(beside_a_gpu(*named), tmp_path_factory.mktemp("recording"))
