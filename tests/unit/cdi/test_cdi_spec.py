"""CDI specs as runtimes read them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from railmate.cdi import spec
from railmate.cdi.spec import CdiDevice, DeviceNode, Gate, nodes_word

UID = "00000000-0000-4000-8000-000000000001"
GATE = Gate(
    Path("/var/lib/kubelet/plugins/railmate.dev/gate"), Path("/var/lib/attached"), UID, "railmate.dev"
)


def render(*devices: CdiDevice) -> Any:
    return spec.render("railmate.dev", devices)


def test_device_nodes_name_both_sides() -> None:
    (device,) = render(CdiDevice("a", (DeviceNode("/dev/nvidia0", "/host/dev/nvidia0"),)))["devices"]
    assert device["containerEdits"] == {
        "deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/host/dev/nvidia0", "permissions": "rw"}]
    }


def test_gate_runs_before_the_container_starts_and_knows_where_to_look() -> None:
    (device,) = render(CdiDevice("a", gate=GATE))["devices"]
    (hook,) = device["containerEdits"]["hooks"]
    assert hook["hookName"] == "createRuntime"
    assert hook["path"] == str(GATE.executable)
    assert hook["args"] == ["gate", "/var/lib/attached", UID, "railmate.dev"]
    assert 0 < hook["timeout"] <= 10
    (device,) = render(CdiDevice("a", gate=replace(GATE, nodes="abc")))["devices"]
    assert device["containerEdits"]["hooks"][0]["args"][4:] == ["abc"]


def test_other_device_nodes_have_another_word_in_whatever_order() -> None:
    one, other = DeviceNode("/dev/a", "/host/dev/a"), DeviceNode("/dev/a", "/host/dev/b")
    assert nodes_word([]) == ""
    assert nodes_word([one]) != nodes_word([other])
    assert nodes_word([one, other]) == nodes_word([other, one])


def test_metadata_is_mounted_read_only() -> None:
    (device,) = render(CdiDevice("a", metadata_file=Path("/p/m.json"), metadata_mount="/in/m.json"))[
        "devices"
    ]
    (mount,) = device["containerEdits"]["mounts"]
    assert (mount["hostPath"], mount["containerPath"]) == ("/p/m.json", "/in/m.json")
    assert "ro" in mount["options"]


def test_device_that_edits_nothing_is_left_out() -> None:
    assert [device["name"] for device in render(CdiDevice("a"), CdiDevice("b", gate=GATE))["devices"]] == [
        "b"
    ]


def test_names_are_what_the_cdi_specification_allows() -> None:
    kind = spec.kind("railmate.dev")
    assert re.fullmatch(r"[a-zA-Z]([a-zA-Z0-9_.-]*[a-zA-Z0-9])?/[a-zA-Z]([a-zA-Z0-9_-]*[a-zA-Z0-9])?", kind)
    name = spec.device_name(UID, "pair-0000-07-00-0")
    assert re.fullmatch(r"[a-zA-Z0-9]([a-zA-Z0-9_.:-]*[a-zA-Z0-9])?", name)
    assert spec.device_id("railmate.dev", name) == f"{kind}={name}"


def test_claim_is_found_in_our_cdi_ids_only() -> None:
    ours = spec.device_id("railmate.dev", spec.device_name(UID, "pair-0000-07-00-0"))
    assert spec.claim_uid_of("railmate.dev", ours) == UID
    assert spec.claim_uid_of("other.dev", ours) is None
    assert spec.claim_uid_of("railmate.dev", "nvidia.com/gpu=GPU-1") is None
    assert spec.claim_uid_of("railmate.dev", "") is None


def test_one_file_a_claim_that_runtimes_read() -> None:
    names = {spec.file_name(driver, uid) for driver in ("a.dev", "b.dev") for uid in (UID, "other")}
    assert len(names) == 4
    assert all(name.endswith(".json") and "/" not in name for name in names)


def test_spec_is_of_a_version_that_has_what_it_uses() -> None:
    assert render(CdiDevice("a", gate=GATE))["cdiVersion"] == "0.5.0"
