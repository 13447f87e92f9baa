"""Override files: railmate's YAML and NCCL's XML, and what is said about bad ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from railmate.errors import UsageError
from railmate.topology.overridefile import load_override, with_roles
from railmate_api.override import (
    OverrideError,
    OverridePair,
    OverrideSwitch,
    RoleRule,
    TopologyOverride,
    decode_override,
    json_schema,
    parse_role,
)

HEAD = "apiVersion: railmate.dev/v1alpha1\nkind: TopologyOverride\n"
WHOLE = (
    HEAD
    + """\
switches:
- {id: socket0, devices: ["0000:03:00.0"]}
- id: 0000:AA:00.0
  parent: socket0
  devices: [0000:07:00.0, 0000:0C:00.0]
numaNodes:
  0000:07:00.0: 3
  0000:0c:00.0: -1
roles:
- {address: 0000:82:00.0, role: storage}
- {model: "15B3:A2DC", role: other}
- {name: "enp5*", role: management}
rails: {0000:0c:00.0: 4}
pairs:
- {gpus: [0000:07:00.0], nics: [0000:0c:00.0, 0000:0d:00.0]}
"""
)


def load(tmp_path: Path, text: str | bytes, name: str = "override.yaml") -> TopologyOverride:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_override(path)


def problem(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/override.yaml: ")
    assert message.count("\n") == 0
    assert re.search(r"\. [A-Z][^.]*\.$", message), f"no next step: {message}"
    return message


@pytest.mark.parametrize("text", ["[" * 3000, HEAD + "switches: " + "[" * 3000, "{a: " * 3000])
def test_a_file_that_is_nested_without_end_is_refused(tmp_path: Path, text: str) -> None:
    assert "nested too deeply" in problem(tmp_path, text)


def test_an_nccl_file_may_be_utf_16(tmp_path: Path) -> None:
    xml = (
        '<?xml version="1.0" encoding="UTF-16"?><system version="1"><cpu numaid="1">'
        '<pci busid="0000:10:1c.0" class="0x030200"/></cpu></system>'
    )
    assert load(tmp_path, xml.encode("utf-16")) == load(tmp_path, xml.replace("UTF-16", "UTF-8"))


def test_everything_that_an_override_can_say_with_addresses_quoted_or_not(tmp_path: Path) -> None:
    """Unquoted, YAML 1.1 would read 0000:07:00.0 as the number 420."""
    assert load(tmp_path, WHOLE) == TopologyOverride(
        switches=(
            OverrideSwitch("socket0", ("0000:03:00.0",)),
            OverrideSwitch("0000:aa:00.0", ("0000:07:00.0", "0000:0c:00.0"), "socket0"),
        ),
        numa_nodes={"0000:07:00.0": 3, "0000:0c:00.0": -1},
        roles=(
            RoleRule("storage", address="0000:82:00.0"),
            RoleRule("other", model="15b3:a2dc"),
            RoleRule("management", name="enp5*"),
        ),
        rails={"0000:0c:00.0": 4},
        pairs=(OverridePair(("0000:07:00.0",), ("0000:0c:00.0", "0000:0d:00.0")),),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty"]),
        ("just text", ["line 1", "must be an object, not text"]),
        ("a: [1", ["line 1", "expected"]),
        ("a: \t- b", ["line 1"]),
        (b"\xff\xfe\x00", ["no YAML"]),
        ("kind: TopologyOverride", ["apiVersion", "railmate.dev/v1alpha1"]),
        ("apiVersion: railmate.dev/v1alpha1\nkind: Pod", ["line 2", "kind", "'Pod'"]),
        (HEAD + "switch: []", ["line 3", "switch", "no known field", "switches"]),
        (HEAD + "switches: {}", ["line 3", "switches", "must be a list, not an object"]),
        (
            HEAD + "switches:\n- id: a\n  devices:\n  - '07:00.0'",
            ["line 6", "switches[0].devices[0]", "'07:00.0'"],
        ),
        (HEAD + "switches:\n- devices: []", ["line 4", "switches[0].id", "None"]),
        (HEAD + "switches:\n- id: a\n- id: a", ["line 5", "switches[1].id", "used twice"]),
        (HEAD + "switches:\n- id: Left_1", ["line 4", "switches[0].id", "lower-case", "'Left_1'"]),
        (HEAD + "switches:\n- id: " + "a" * 57, ["line 4", "56 at most"]),
        (HEAD + "switches:\n- id: ffff:ff:01.0\n- id: ffff-ff-01-0", ["line 5", "too like 'ffff:ff:01.0'"]),
        (HEAD + "switches:\n- {id: a, parent: b}", ["line 4", "switches[0].parent", "'b' is no switch"]),
        (HEAD + "switches:\n- {id: a, parent: b}\n- {id: b, parent: a}", ["line 4", "above and below"]),
        (
            HEAD + "switches:\n- {id: a, devices: [0000:07:00.0]}\n- {id: b, devices: [0000:07:00.0]}",
            ["line 5", "switches[1].devices[0]", "named already in switches[0].devices[0]"],
        ),
        (HEAD + "numaNodes:\n  0000:07:00.0: one", ["line 4", "numaNodes.0000:07:00.0", "whole number"]),
        (HEAD + "numaNodes:\n  0000:07:00.0: true", ["line 4", "whole number"]),
        (HEAD + "numaNodes:\n  nonsense: 1", ["line 4", "PCI address"]),
        (HEAD + "rails:\n  0000:07:00.0: -1", ["line 4", "from 0"]),
        (HEAD + "rails:\n  0000:07:00.0: 1\n  0000:07:00.0: 2", ["line 5", "rails.0000:07:00.0", "twice"]),
        (HEAD + "roles:\n- {address: 0000:82:00.0, role: boss}", ["line 4", "roles[0].role", "'boss'"]),
        (HEAD + "roles:\n- {role: other}", ["line 4", "roles[0]", "exactly one"]),
        (HEAD + "roles:\n- {role: other, model: '15b3:1021', name: a}", ["exactly one"]),
        (HEAD + "roles:\n- {role: other, model: mlx5}", ["roles[0].model", "15b3:a2dc"]),
        (HEAD + "pairs:\n- {gpus: [], nics: [0000:0c:00.0]}", ["line 4", "pairs[0]", "at least one"]),
        (HEAD + "switches: &a\n- {id: x}\nroles: *a", ["line 3", "alias"]),
        (HEAD + "pairs: &a [*a]", ["line 3", "alias"]),
        (HEAD + "? [a]\n: b", ["line 3", "key must be text"]),
        (b"#" * ((1 << 20) + 1), ["larger than 1 MiB"]),
    ],
)
def test_a_bad_override_is_refused_with_its_line_and_field(
    tmp_path: Path, text: str | bytes, words: list[str]
) -> None:
    message = problem(tmp_path, text)
    assert all(word in message for word in words), message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere: cannot be read \(No such file.*--override"):
        load_override(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="cannot be read"):
        load_override(tmp_path)


def test_role_rules_of_a_command_line_come_first() -> None:
    override = with_roles(
        TopologyOverride(roles=(RoleRule("other", name="a"),)),
        ["0000:82:00.0=storage", "15b3:A2DC=other", "p[01]*=rail"],
    )
    assert override is not None
    assert override.roles == (
        RoleRule("storage", address="0000:82:00.0"),
        RoleRule("other", model="15b3:a2dc"),
        RoleRule("rail", name="p[01]*"),
        RoleRule("other", name="a"),
    )
    assert with_roles(None, []) is None
    assert with_roles(None, ["10000:01:00.0=rail"]) == TopologyOverride(
        roles=(RoleRule("rail", address="10000:01:00.0"),)
    )


@pytest.mark.parametrize(
    "rule", ["", "=", "=rail", "mlx5_0", "mlx5_0=", "mlx5_0=boss", "a b=rail", "82:00.0=rail"]
)
def test_a_bad_role_rule_is_refused(rule: str) -> None:
    with pytest.raises(OverrideError, match=r"ADDRESS=ROLE|must be one of|no PCI address"):
        parse_role(rule)
    with pytest.raises(UsageError, match="--role"):
        with_roles(None, [rule])


def test_the_schema_describes_every_field_of_the_file() -> None:
    schema = json_schema()

    def walk(part: Any) -> None:
        if part.get("type") == "object" and "properties" in part:
            assert part["additionalProperties"] is False
            for name, held in part["properties"].items():
                assert name in {"apiVersion", "kind"} or held["description"]
                walk(held)
        if part.get("type") == "array":
            walk(part["items"])

    walk(schema)
    top = set(schema["properties"])
    assert top == {"apiVersion", "kind", "switches", "numaNodes", "roles", "rails", "pairs"}
    empty = {"apiVersion": "railmate.dev/v1alpha1", "kind": "TopologyOverride"}
    assert decode_override({**empty, **dict.fromkeys(top - set(empty))}) == TopologyOverride()


def test_the_schema_file_is_the_one_that_follows_from_the_types() -> None:
    text = (Path(__file__).parents[3] / "api/schema/topologyoverride.v1alpha1.json").read_text()
    assert json.loads(text) == json_schema(), "write it anew: see the end of railmate_api/override.py"


# --- NCCL topology files

CPU = '<system version="1"><cpu numaid="{numa}">{inside}</cpu></system>'


def test_switches_of_an_nccl_file_with_invented_addresses(tmp_path: Path) -> None:
    """As Azure's are: GPUs by class alone, no ids on the switches."""
    override = load(
        tmp_path,
        """\
<?xml version="1.0" encoding="UTF-8"?>
<!-- invented addresses -->
<system version="1">
  <cpu numaid="1" affinity="ffff" arch="x86_64">
    <pci busid="ffff:ff:01.0" class="0x060400" link_speed="16 GT/s" link_width="16">
      <pci busid="0001:00:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>
      <pci busid="0101:00:00.0" class="0x020700" link_speed="16 GT/s" link_width="16"/>
    </pci>
    <pci busid="0102:00:00.0" class="0x020700"/>
    <pci busid="ffff:ff:09.0" class="0x060400"/>
  </cpu>
</system>
""",
        "topo.xml",
    )
    assert override == TopologyOverride(
        switches=(
            OverrideSwitch("ffff:ff:01.0", ("0001:00:00.0", "0101:00:00.0")),
            OverrideSwitch("ffff:ff:09.0"),
        ),
        numa_nodes={"0001:00:00.0": 1, "0101:00:00.0": 1, "0102:00:00.0": 1},
    )


def test_two_levels_of_one_broadcom_chip_are_one_switch_and_other_levels_stay(tmp_path: Path) -> None:
    upper = (
        'class="0x060400" vendor="0x1000" device="0xc030" subsystem_vendor="0x1000" subsystem_device="0x0072"'
    )
    lower = upper.replace("0x0072", "0x1003")
    inside = f"""
      <pci busid="0000:01:00.0" {upper}>
        <pci busid="0000:03:00.0" {lower}>
          <pci busid="0000:05:00.0" class="0x030200"><gpu dev="0" sm="90"/></pci>
          <pci busid="0000:06:00.0" class="0x060400" vendor="0x15b3" device="0x1979">
            <pci busid="0000:08:00.0" class="0x030200"><gpu dev="1"/></pci>
          </pci>
        </pci>
        <pci busid="0000:0a:00.0" class="0x020000"><nic><net name="mlx5_0" dev="0"/></nic></pci>
      </pci>"""
    assert load(tmp_path, CPU.format(numa=-1, inside=inside)).switches == (
        OverrideSwitch("0000:01:00.0", ("0000:05:00.0", "0000:0a:00.0")),
        OverrideSwitch("0000:06:00.0", ("0000:08:00.0",), "0000:01:00.0"),
    )


PCI = '<pci busid="0000:07:00.0" class="0x030200"/>'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<system", ["line 1", "no well-formed XML"]),
        ("<system>\n<cpu>\n</system>", ["line 3", "mismatched tag"]),
        ("<graphs version='1'/>", ["line 1", "<graphs>", "<system>"]),
        ("<system/>", ["line 1", "says nothing of any device"]),
        (CPU.format(numa="x", inside=PCI), ["line 1", "numaid='x'"]),
        ("<system>\n<cpu>" + PCI + "</cpu></system>", ["line 2", "numaid=''"]),
        (CPU.format(numa=0, inside="\n<pci/>"), ["line 2", "busid=''", "dddd:bb:dd.f"]),
        (CPU.format(numa=0, inside="\n<pci busid='07:00.0'/>"), ["line 2", "07:00.0"]),
        (CPU.format(numa=0, inside=f"\n{PCI}\n{PCI}"), ["line 3", "at line 2"]),
        ("<!DOCTYPE system>" + CPU.format(numa=0, inside=PCI), ["line 1", "DOCTYPE", "refused"]),
        (
            '<!DOCTYPE s [\n<!ENTITY a "aaaa">\n<!ENTITY b "&a;&a;&a;">]>' + CPU.format(numa=0, inside="&b;"),
            ["DOCTYPE", "refused"],
        ),
        ('<!DOCTYPE s [<!ENTITY a SYSTEM "file:///etc/passwd">]><system>&a;</system>', ["refused"]),
        ("<system>&undefined;</system>", ["undefined entity"]),
        (CPU.format(numa=0, inside="<pci busid='0000:07:00.0'>" * 80), ["64 levels"]),
        (CPU.format(numa=0, inside="<x/>" * 20001), ["20000 elements"]),
        (b"<system>\xff</system>", ["no well-formed XML"]),
    ],
)
def test_a_bad_nccl_file_is_refused_with_its_line(
    tmp_path: Path, text: str | bytes, words: list[str]
) -> None:
    message = problem(tmp_path, text)
    assert all(word in message for word in words), message
