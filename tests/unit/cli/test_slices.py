"""railmate slices: what would be published, as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from railmate.cli.main import main

Root = Callable[[str, int], Path]


def slices(root: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    tree = ["--sysfs-root", str(root / "sys"), "--proc-root", str(root / "proc")]
    assert main(["slices", *tree, "--node-name", "node1", *more]) == 0
    out, err = capsys.readouterr()
    assert err == ""
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


def test_share_pair_vfs_offers_more(machine_root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    root = machine_root("dgx-a100", 4)

    def count(*more: str) -> int:
        documents = yaml.safe_load_all(slices(root, capsys, *more))
        return sum(len(document["spec"].get("devices", [])) for document in documents)

    assert count("--share-pair-vfs") - count() == 8


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


def test_notes_about_the_machine_go_to_stderr(machine_root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    root = machine_root("aws-p4d", 0)
    assert main(["slices", "--sysfs-root", str(root / "sys"), "--proc-root", str(root / "proc")]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("railmate: ")
    assert list(yaml.safe_load_all(out))


def test_proc_beside_the_tree_is_read_by_default(
    machine_root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    """As railmate topology does: a recorded machine must not be mixed with the driver of this one."""
    root = machine_root("dgx-a100", 4)
    assert main(["slices", "--sysfs-root", str(root / "sys"), "--node-name", "node1"]) == 0
    assert capsys.readouterr().out == slices(root, capsys)
