"""railmate slices: what would be published, as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from railmate.cli.main import main

Root = Callable[[str, int], Path]


def slices(root: Path, capsys: pytest.CaptureFixture[str], *more: str, ok_notes: bool = False) -> str:
    tree = ["--sysfs-root", str(root / "sys"), "--proc-root", str(root / "proc")]
    assert main(["slices", *tree, "--node-name", "node1", *more]) == 0
    out, err = capsys.readouterr()
    assert err == "" or ok_notes
    return out


def test_yaml_and_json_say_the_same(machine_root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    root = machine_root("dgx-a100", 4)
    documents = list(yaml.safe_load_all(slices(root, capsys)))
    listing = json.loads(slices(root, capsys, "-o", "json"))
    assert (listing["apiVersion"], listing["kind"]) == ("v1", "List")
    assert listing["items"] == documents
    assert [item["kind"] for item in documents] == ["ResourceSlice", "ResourceSlice"]


def test_output_is_the_same_byte_for_byte(machine_root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    root = machine_root("dgx-a100", 4)
    assert slices(root, capsys) == slices(root, capsys)


def test_numbers_stay_numbers_and_addresses_strings(
    machine_root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    """YAML 1.1 reads 0000:07:00.0 and 12:30:45 as other things where they are not quoted."""
    documents = list(yaml.safe_load_all(slices(machine_root("dgx-a100", 4), capsys)))
    for document in documents:
        for device in document["spec"].get("devices", []):
            for name, value in device["attributes"].items():
                ((kind, content),) = value.items()
                assert isinstance(content, {"string": str, "int": int, "bool": bool}[kind]), name


def test_names_that_are_given_are_used(machine_root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    text = slices(machine_root("dgx-a100", 4), capsys, "--driver-name", "fabric.example.com")
    for document in yaml.safe_load_all(text):
        assert document["spec"]["driver"] == "fabric.example.com"
        assert document["spec"]["nodeName"] == document["spec"]["pool"]["name"] == "node1"
        assert document["metadata"]["name"].endswith("-fabric.example.com-node1")


def test_under_another_driver_the_attributes_keep_their_domain(
    machine_root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    """A claim or class that names railmate.dev/pcieSwitch works whatever the driver is called."""
    text = slices(machine_root("dgx-a100", 4), capsys, "--driver-name", "fabric.example.com")
    found = [one for one in devices(text) if one["railmate.dev/kind"] != {"string": "node"}]
    assert all(f"railmate.dev/{SWITCH}" in one and SWITCH not in one for one in found)


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        (["--share-pair-vfs"], 8),
        (["--lone-vfs", "all"], 0),
        (["--lone-vfs=1"], -16),
        (["--lone-vfs=none"], -24),
        (["--switch-groups"], 4),
        (["--publish=all"], 0),
        (["--publish=nics"], -9),
    ],
)
def test_flags_say_how_much_is_offered(
    machine_root: Root, capsys: pytest.CaptureFixture[str], flags: list[str], more: int
) -> None:
    root = machine_root("dgx-a100", 4)
    assert len(devices(slices(root, capsys, *flags))) == len(devices(slices(root, capsys))) + more


@pytest.mark.parametrize("bad", ["some", "-1", "1.5", ""])
def test_lone_vfs_that_are_no_number_are_bad_usage(capsys: pytest.CaptureFixture[str], bad: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["slices", f"--lone-vfs={bad}"])
    assert ended.value.code == 2
    assert "neither all, none nor a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [("--driver-name", "Not A Name"), ("--driver-name", ""), ("--node-name", "Bad_Node")]
)
def test_name_that_no_server_takes_is_bad_usage(
    machine_root: Root, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    root = machine_root("dgx-a100", 4)
    code = main(["slices", "--sysfs-root", str(root / "sys"), "--node-name", "node1", *option])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert option[0] in err


def devices(text: str) -> list[dict[str, dict[str, object]]]:
    """The attributes of all devices."""
    documents = yaml.safe_load_all(text)
    return [device["attributes"] for document in documents for device in document["spec"].get("devices", [])]


SWITCH, SOURCE = "pcieSwitch", "topologySource"  # in the driver's own domain
OVERRIDE = """\
apiVersion: railmate.dev/v1alpha1
kind: TopologyOverride
numaNodes: {0000:20:1c.0: 5}
switches:
- {id: left, devices: [0000:10:1b.0, 0000:10:1c.0, 0000:10:1d.0]}
"""


@pytest.mark.parametrize("name", ["aws-p4d", "lassen-p9", "tuolumne-mi300a"])
def test_without_switch_knowledge_no_switch_is_published(
    machine_root: Root, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    root = machine_root(name, 0)
    assert main(["slices", "--sysfs-root", str(root / "sys"), "--node-name", "node1"]) == 0
    out, err = capsys.readouterr()
    found = devices(out)
    assert len(found) >= 4
    assert not [one for one in found if SWITCH in one]
    assert {one[SOURCE]["string"] for one in found} == {"numa"}
    assert "by NUMA node" in err


def test_an_override_gives_switches_to_what_it_names_and_nothing_else(
    machine_root: Root, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "o.yaml").write_text(OVERRIDE)
    root = machine_root("aws-p4d", 0)
    more = ["--node-name", "node1", "--override", str(tmp_path / "o.yaml")]
    assert main(["slices", "--sysfs-root", str(root / "sys"), *more]) == 0
    found = {
        str(one["resource.kubernetes.io/pciBusID"]["string"]): one for one in devices(capsys.readouterr().out)
    }
    with_switch = {address: one[SWITCH]["string"] for address, one in found.items() if SWITCH in one}
    assert with_switch["0000:10:1c.0"] == with_switch["0000:10:1d.0"] == "left"
    assert set(with_switch) <= {"0000:10:1b.0", "0000:10:1c.0", "0000:10:1d.0"}
    assert all(found[address][SOURCE] == {"string": "override"} for address in with_switch)
    assert found["0000:20:1c.0"]["resource.kubernetes.io/numaNode"] == {"int": 5}


def test_switches_of_an_override_are_published_as_they_are_written(
    machine_root: Root, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = "apiVersion: railmate.dev/v1alpha1\nkind: TopologyOverride\nswitches:\n"
    ids = ["a" * 56, "ffff:ff:01.0"]
    (tmp_path / "o.yaml").write_text(
        f"{head}- {{id: {ids[0]}, devices: [0000:07:00.0, 0000:0c:00.0]}}\n"
        f"- {{id: {ids[1]}, devices: [0000:0f:00.0, 0000:12:00.0]}}\n"
    )
    out = slices(machine_root("dgx-a100", 4), capsys, "--override", str(tmp_path / "o.yaml"), ok_notes=True)
    assert {one[SWITCH]["string"] for one in devices(out) if SWITCH in one} >= set(ids)


def test_a_role_rule_keeps_a_nic_out_of_the_slices(
    machine_root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    root = machine_root("dgx-a100", 4)
    out = slices(root, capsys)
    assert "0000:0c:00.1" in out
    assert (
        main(
            ["slices", "--sysfs-root", str(root / "sys"), "--role", "mlx5_0=storage", "--node-name", "node1"]
        )
        == 0
    )
    assert "0000:0c:00.1" not in capsys.readouterr().out


def test_notes_about_the_machine_go_to_stderr(machine_root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    root = machine_root("aws-p4d", 0)
    assert main(["slices", "--sysfs-root", str(root / "sys"), "--proc-root", str(root / "proc")]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("railmate: ")
    assert list(yaml.safe_load_all(out))


def test_what_is_not_offered_is_said_on_stderr(
    machine_root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    root = machine_root("tuolumne-mi300a", 0)
    assert main(["slices", "--sysfs-root", str(root / "sys"), "--node-name", "node1"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^railmate: rail NICs 0000:.* are not offered: no RDMA device$", err, re.MULTILINE)
    assert "are not offered" not in out


def test_proc_beside_the_tree_is_read_by_default(
    machine_root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    """As railmate topology does: a recorded machine must not be mixed with the driver of this one."""
    root = machine_root("dgx-a100", 4)
    assert main(["slices", "--sysfs-root", str(root / "sys"), "--node-name", "node1"]) == 0
    assert capsys.readouterr().out == slices(root, capsys)


def test_shared_functions_are_printed_as_they_would_be_published(
    machine_root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    root = machine_root("dgx-a100", 4)
    text = slices(root, capsys, "--shared-pfs", "0000:0c:00.0=2", "--shared-pfs=enp*=16")
    found = {
        device["name"]: device["capacity"]["subInterfaces"]["value"]
        for document in yaml.safe_load_all(text)
        for device in document["spec"].get("devices", [])
        if device.get("allowMultipleAllocations")
    }
    assert len(found) == 8
    assert found.pop("shared-0000-0c-00-0") == "2"
    assert set(found.values()) == {"16"}


def test_a_rule_to_share_that_is_none_is_bad_usage(
    machine_root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    root = machine_root("dgx-a100", 4)
    assert main(["slices", "--sysfs-root", str(root / "sys"), "--shared-pfs=enp*"]) == 2
    assert "write NIC=N" in capsys.readouterr().err
