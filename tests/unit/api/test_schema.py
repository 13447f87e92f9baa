"""The JSON schema: complete, up to date, and of one mind with the decoder."""

from __future__ import annotations

from pathlib import Path

from component.config_values import KINDS
from railmate_api import config, fields, schema
from railmate_api.attributes import CONFIG_API_VERSION

ROOT = Path(__file__).resolve().parents[3]
HEAD = {"apiVersion": CONFIG_API_VERSION, "kind": "EveryType"}


def test_the_file_is_up_to_date() -> None:
    """Else: hack/env python -m railmate_api.schema > api/schema/config.v1alpha1.json"""
    assert (ROOT / "api/schema/config.v1alpha1.json").read_text() == schema.text()


def test_every_field_is_described_with_its_range_and_what_happens_without_it() -> None:
    for kind, of in config.KINDS.items():
        properties = schema.schema()["$defs"][kind]["properties"]
        assert set(properties) == {*config.TYPE_FIELDS, *(one.name for one in fields.settings(of).values())}
        for one in fields.settings(of).values():
            text = properties[one.name]["description"]
            assert one.meaning in text
            assert one.type.expected[1:] in text
            assert one.unset in text


def test_numbers_carry_their_unit() -> None:
    mtu = schema.schema(KINDS)["$defs"]["EveryType"]["properties"]["mtu"]
    assert mtu["description"] == "MTU. Must be a whole number from 68 to 65535 bytes. Left out: the PF's."
    assert (mtu["type"], mtu["minimum"], mtu["maximum"]) == ("integer", 68, 65535)


def test_rules_between_fields_are_in_the_schema_or_at_least_in_its_words() -> None:
    body = schema.schema()["$defs"]["RdmaVfConfig"]
    assert body["dependentRequired"] == {"vlanQoS": ["vlan"], "vlanProtocol": ["vlan"]}
    assert "minTxRate must not be above maxTxRate." in body["description"]
    assert body["properties"]["rules"]["items"]["allOf"] == [
        {"anyOf": [{"required": ["source"]}, {"required": ["destination"]}]}
    ]
