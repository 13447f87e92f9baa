"""railmate topology: what it prints and what it answers to bad input."""

from __future__ import annotations

import argparse
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from harness.machines import MACHINES, load_machine, parse_machine
from harness.synthetic import inventory_of
from harness.sysfs import write_tree
from railmate.cli import topology as command
from railmate.errors import UsageError
from railmate.topology.analyze import analyze
from railmate.topology.model import Topology


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dgx")
    write_tree(load_machine(MACHINES / "dgx-a100.yaml", vfs_per_rail=4), root)
    return root / "sys"


@pytest.fixture(scope="module")
def p4d(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("p4d")
    write_tree(load_machine(MACHINES / "aws-p4d.yaml"), root)
    return root / "sys"


def railmate(*words: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["topology", *map(str, words)])
    return int(command.run(args))


def test_json_has_the_documented_fields(dgx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert railmate("--sysfs-root", dgx, "-o", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["machineClass"] == "switched"
    assert len(document["gpus"]) == 8
    assert len(document["nics"]) == 11 + 32
    assert len(document["paths"]) == 8 * (11 + 32)
    assert len(document["pairs"]) == 8
    assert (
        document["gpus"][0].items()
        >= {
            "pciBusID": "0000:07:00.0",
            "pcieRoot": "pci0000:00",
            "pcieSwitch": "0000:01:00.0",
            "numaNode": 3,
            "vendorID": "10de",
            "deviceID": "20b0",
        }.items()
    )
    vf = next(nic for nic in document["nics"] if nic["pciBusID"] == "0000:0c:00.1")
    assert (
        vf.items()
        >= {
            "pcieSwitch": "0000:01:00.0",
            "physicalFunction": "0000:0c:00.0",
            "role": "rail",
            "netdevs": ["enp12s0v0"],
            "rdmaDevices": ["mlx5_0v0"],
        }.items()
    )
    paths = {(path["gpu"], path["nic"]): path for path in document["paths"]}
    assert len(paths) == len(document["paths"])
    own, port = (paths["0000:07:00.0", nic] for nic in ("0000:0c:00.1", "0000:0c:00.0"))
    assert own == {**port, "nic": "0000:0c:00.1"}, "a VF is where its PF is"
    storage = next(nic for nic in document["nics"] if nic["pciBusID"] == "0000:e1:00.0")
    assert storage["pcieSwitch"] is None
    assert storage["role"] == "other"
    assert (
        document["paths"][0].items()
        >= {
            "gpu": "0000:07:00.0",
            "nic": "0000:0c:00.0",
            "distance": "PXB",
            "pcieSwitch": "0000:01:00.0",
        }.items()
    )
    assert (
        document["pairs"][1].items()
        >= {
            "gpu": "0000:0f:00.0",
            "nics": ["0000:0c:00.0"],
            "distance": "PXB",
            "source": "sysfs",
        }.items()
    )


def test_json_of_a_group_has_an_entry_for_each_gpu(p4d: Path, capsys: pytest.CaptureFixture[str]) -> None:
    railmate("--sysfs-root", p4d, "-o", "json")
    pairs = json.loads(capsys.readouterr().out)["pairs"]
    assert len(pairs) == 8
    assert pairs[0]["nics"] == pairs[1]["nics"] == ["0000:10:1b.0"]
    assert pairs[0]["sharedWith"] == ["0000:10:1d.0"]
    assert {pair["source"] for pair in pairs} == {"numa"}


def test_the_same_tree_prints_the_same_json(dgx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for _ in range(2):
        railmate("--sysfs-root", dgx, "-o", "json")
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_the_table_is_a_matrix_with_the_pairs_marked(dgx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    railmate("--sysfs-root", dgx)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Machine class: switched"
    row = next(line.split() for line in lines if line.split()[:1] == ["GPU1"])
    assert row == ["GPU1", "PXB*", "PXB", *["SYS"] * 8]
    assert max(map(len, lines)) <= 100


def test_the_table_says_why_pairs_are_by_numa(p4d: Path, capsys: pytest.CaptureFixture[str]) -> None:
    railmate("--sysfs-root", p4d)
    out = capsys.readouterr().out
    assert "Machine class: integrated" in out
    assert "no PCIe switch is visible" in out


def test_the_tree_shows_each_device_below_its_bridges(dgx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    railmate("--sysfs-root", dgx, "-o", "tree")
    out = capsys.readouterr().out
    assert len(re.findall(r"GPU\d ", out)) == 8
    assert out.count("[switch]") == 4
    assert "0c:00.0  NIC0 mlx5_0 enp12s0np0 [rail 0] 4 VFs 0c:00.1…0c:00.4" in out


@pytest.mark.parametrize("columns", [40, 50, 80])
def test_the_tree_keeps_to_the_terminals_width_and_loses_nothing(
    columns: int, dgx: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def words() -> list[str]:
        return [word for word in capsys.readouterr().out.split() if not set(word) <= set("├─└│")]

    railmate("--sysfs-root", dgx, "-o", "tree")
    whole = words()
    assert "(PXB" in whole
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    railmate("--sysfs-root", dgx, "-o", "tree")
    out = capsys.readouterr().out
    assert columns - 5 <= max(map(len, out.splitlines())) <= columns
    assert [word for word in out.split() if not set(word) <= set("├─└│")] == whole


@pytest.mark.parametrize("machine", sorted(path.stem for path in MACHINES.glob("*.yaml")))
def test_the_picture_is_self_contained_and_shows_every_pair(
    machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = load_machine(MACHINES / f"{machine}.yaml")
    write_tree(facts, tmp_path)
    railmate("--sysfs-root", tmp_path / "sys", "-o", "svg")
    svg = capsys.readouterr().out
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"<script|href|url\(|<image|@import", svg)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for index in range(len(facts.expected["gpus"])):
        assert f"GPU{index}" in texts
    rails = [address.removeprefix("0000:") for address in facts.rails]
    assert rails
    assert all(any(address in text for text in texts) for address in rails)


def test_boxes_of_the_picture_do_not_overlap(dgx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    railmate("--sysfs-root", dgx, "-o", "svg")
    root = ElementTree.fromstring(capsys.readouterr().out)
    boxes = [
        tuple(float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        for rect in root.iter("{http://www.w3.org/2000/svg}rect")
        if rect.attrib.get("height") == "50"
    ]
    assert len(boxes) == 8 + 8 + 2
    for index, (x, y, width, height) in enumerate(boxes):
        for x2, y2, width2, height2 in boxes[index + 1 :]:
            assert x + width <= x2 or x2 + width2 <= x or y + height <= y2 or y2 + height2 <= y


OVERRIDE = """\
apiVersion: railmate.dev/v1alpha1
kind: TopologyOverride
switches:
- {id: left, devices: [0000:10:1b.0, 0000:10:1c.0, 0000:10:1d.0]}
"""


def test_an_override_file_is_used_and_its_answers_say_so(
    p4d: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "o.yaml").write_text(OVERRIDE)
    railmate("--sysfs-root", p4d, "--override", tmp_path / "o.yaml", "-o", "json")
    document = json.loads(capsys.readouterr().out)
    assert document["machineClass"] == "integrated"
    path = document["paths"][0]
    assert (path["gpu"], path["nic"]) == ("0000:10:1c.0", "0000:10:00.0"), "the host's own network card"
    own = next(path for path in document["paths"] if path["nic"] == "0000:10:1b.0")
    assert (own["distance"], own["pcieSwitch"], own["source"], own["ncclDistance"]) == (
        "PIX",
        "left",
        "override",
        "PHB",
    )
    assert document["gpus"][0]["source"] == "override"
    assert document["gpus"][2]["source"] == "numa"
    assert any("The override tells" in note for note in document["notes"])
    railmate("--sysfs-root", p4d, "--override", tmp_path / "o.yaml")
    assert re.search(r"GPU0 GPU1 +NIC\d +PIX +left +override", capsys.readouterr().out)
    railmate("--sysfs-root", p4d, "--override", tmp_path / "o.yaml", "-o", "svg")
    assert "an override tells" in capsys.readouterr().out


def test_a_bad_override_is_a_usage_error_that_names_file_and_line(p4d: Path, tmp_path: Path) -> None:
    (tmp_path / "o.yaml").write_text(OVERRIDE.replace("left", "l e f t"))
    with pytest.raises(UsageError, match=r"o\.yaml: line 4: switches\[0\]\.id"):
        railmate("--sysfs-root", p4d, "--override", tmp_path / "o.yaml")


def test_role_rules_are_used_in_their_order(dgx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    railmate("--sysfs-root", dgx, "--role", "0000:0c:00.0=other", "--role", "mlx5_[01]=storage", "-o", "json")
    roles = {nic["pciBusID"]: nic["role"] for nic in json.loads(capsys.readouterr().out)["nics"]}
    assert [roles[f"0000:{bus}:00.0"] for bus in ("0c", "12", "4b")] == ["other", "storage", "rail"]
    with pytest.raises(UsageError, match="--role"):
        railmate("--sysfs-root", dgx, "--role", "mlx5_0")


def test_the_picture_says_the_class_and_that_pairs_are_by_numa(
    p4d: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    railmate("--sysfs-root", p4d, "-o", "svg")
    out = capsys.readouterr().out
    assert "Machine class integrated" in out
    assert "pairs are by NUMA node" in out


@pytest.mark.parametrize("output", ["table", "tree"])
def test_every_output_for_people_says_the_class_and_why_pairs_are_by_numa(
    p4d: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    railmate("--sysfs-root", p4d, "-o", output)
    out = " ".join(capsys.readouterr().out.split())
    assert "Machine class: integrated" in out
    assert "Class integrated: GPUs and NICs are endpoints of shared host bridges" in out
    assert "so pairs are by host bridge, else by NUMA node" in out


def test_a_recording_is_a_machine_of_the_same_topology(
    dgx: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert railmate("--sysfs-root", dgx, "--record", tmp_path / "mine.yaml") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "mine.yaml" in captured.err
    railmate("--sysfs-root", dgx, "--record", "-")
    assert capsys.readouterr().out == (tmp_path / "mine.yaml").read_text()
    machine = parse_machine(yaml.safe_load((tmp_path / "mine.yaml").read_text()))
    recorded = analyze(inventory_of(machine))
    railmate("--sysfs-root", dgx, "-o", "json")
    document = json.loads(capsys.readouterr().out)
    physical = [path for path in document["paths"] if (path["gpu"], path["nic"]) in _ways(recorded)]
    assert len(physical) == len(recorded.paths) == 88
    assert [(path["distance"], path["pcieSwitch"], path["ncclDistance"]) for path in physical] == [
        (path.distance, path.pcie_switch, path.nccl_distance) for path in recorded.paths
    ]
    assert [pair["nics"] for pair in document["pairs"]] == [list(pair.nics) for pair in recorded.pairs]
    assert len([nic for nic in machine.functions.values() if nic.physical_function]) == 32


def _ways(topology: Topology) -> set[tuple[str, str]]:
    return {(path.gpu, path.nic) for path in topology.paths}


def test_a_recording_that_cannot_be_written_is_a_usage_error(dgx: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere/mine\.yaml: cannot be written .*--record"):
        railmate("--sysfs-root", dgx, "--record", tmp_path / "nowhere/mine.yaml")


def test_a_missing_directory_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--sysfs-root"):
        railmate("--sysfs-root", tmp_path / "nowhere")


def test_warnings_go_to_stderr_and_name_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tree(load_machine(MACHINES / "dgx-a100.yaml"), tmp_path)
    (tmp_path / "sys/bus/pci/devices/0000:07:00.0/numa_node").write_text("rubbish")
    assert railmate("--sysfs-root", tmp_path / "sys", "-o", "json") == 0
    captured = capsys.readouterr()
    assert "numa_node" in captured.err
    assert json.loads(captured.out)["gpus"][0]["numaNode"] is None


@pytest.mark.parametrize("output", ["table", "tree", "svg"])
def test_names_with_escape_codes_do_not_reach_the_terminal(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tree(load_machine(MACHINES / "aws-p4d.yaml"), tmp_path)
    device = (tmp_path / "sys/bus/pci/devices/0000:10:1b.0").resolve()
    (found,) = (device / "infiniband").iterdir()
    found.rename(found.with_name("\x1b[31mred"))
    assert railmate("--sysfs-root", tmp_path / "sys", "-o", output) == 0
    out, err = capsys.readouterr()
    assert "?[31mred" in out
    assert "\x1b" not in out + err
