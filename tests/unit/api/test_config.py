"""User config: decoded strictly, class first and claim last."""

from __future__ import annotations

import json
from typing import Any

import pytest

from railmate_api.config import ConfigError, RdmaVfConfig, decode, merge


def parameters(**fields: Any) -> dict[str, Any]:
    return {"apiVersion": "railmate.dev/v1alpha1", "kind": "RdmaVfConfig", **fields}


def test_config_without_fields_says_nothing() -> None:
    assert decode(parameters()) == RdmaVfConfig(interface_name=None)


@pytest.mark.parametrize("name", ["net1", "a", "rail0", "ib.100", "x-1_2", "abcdefghijklmno"])
def test_interface_name_is_taken(name: str) -> None:
    assert decode(parameters(interfaceName=name)).interface_name == name


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"apiVersion": "railmate.dev/v1"}, "apiVersion"),
        ({"apiVersion": None}, "apiVersion"),
        ({"apiVersion": 1}, "apiVersion"),
        ({"kind": "GpuConfig"}, "kind"),
        ({"kind": None}, "kind"),
        ({"kind": ["RdmaVfConfig"]}, "kind"),
        ({"mtu": 67}, "mtu"),
        ({"mtu": "9000"}, "mtu"),
        ({"interfacename": "net1"}, "interfacename"),
        ({"interface_name": "net1"}, "interface_name"),
        ({"interfaceName": 1}, "interfaceName"),
        ({"interfaceName": True}, "interfaceName"),
        ({"interfaceName": ["net1"]}, "interfaceName"),
        ({"interfaceName": {}}, "interfaceName"),
    ],
)
def test_error_names_the_field(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        decode(parameters() | changed)


def test_unknown_field_comes_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="interfaceName"):
        decode(parameters(name="net1"))


@pytest.mark.parametrize("value", [None, [], "text", 5, True])
def test_what_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="object"):
        decode(value)


@pytest.mark.parametrize(
    "name",
    ["", "abcdefghijklmnop", "a b", "a/b", "a:b", ".", "..", "-a", "net%d", "net1\n", "nét1", "lo", "eth0"],
)
def test_what_is_no_free_interface_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="interfaceName"):
        decode(parameters(interfaceName=name))


@pytest.mark.parametrize("missing", ["apiVersion", "kind"])
def test_version_and_kind_are_required(missing: str) -> None:
    value = parameters()
    del value[missing]
    with pytest.raises(ConfigError, match=missing):
        decode(value)


def test_error_is_one_line_also_for_hostile_input() -> None:
    with pytest.raises(ConfigError) as caught:
        decode(parameters(**{"a\nb": 1}))
    assert "\n" not in str(caught.value)


def test_later_config_wins_and_silence_keeps_what_was_said() -> None:
    of_class, of_claim, silent = RdmaVfConfig("fabric0"), RdmaVfConfig("rail0"), RdmaVfConfig()
    assert merge([of_class, of_claim], RdmaVfConfig).interface_name == "rail0"
    assert merge([of_class, silent], RdmaVfConfig).interface_name == "fabric0"
    assert merge([silent, of_claim], RdmaVfConfig).interface_name == "rail0"
    assert merge([], RdmaVfConfig) == RdmaVfConfig()


def test_decoder_reads_what_json_gives() -> None:
    text = json.dumps(parameters(interfaceName="rail0"))
    assert decode(json.loads(text)).interface_name == "rail0"
