"""The provisioning file is decoded strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from railmate.errors import UsageError
from railmate.provision.file import load_provisioning
from railmate_api.provisioning import ProvisioningError, decode_provisioning, json_schema

HEAD = {"apiVersion": "railmate.dev/v1alpha1", "kind": "VfProvisioning"}
GOOD = {**HEAD, "rules": [{"select": {"role": "rail"}, "vfs": 8, "mtu": 9000, "eswitch": "switchdev"}]}


def rule(**fields: Any) -> Mapping[str, Any]:
    return {**HEAD, "rules": [{"select": {"role": "rail"}, "vfs": 1} | fields]}


WRONG: Mapping[str, tuple[Any, str]] = {
    "no object": ([], "the document must be an object"),
    "kind": ({**GOOD, "kind": "RdmaVfConfig"}, "kind must be VfProvisioning"),
    "version": ({**GOOD, "apiVersion": "railmate.dev/v2"}, "apiVersion must be railmate.dev/v1alpha1"),
    "no rules": ({**HEAD, "rules": []}, "rules must be a list of 1 to 64 entries"),
    "unknown field": (rule(vf=3), 'rules[0] has no field "vf"'),
    "selects everything": (rule(select={}), "rules[0].select must have at least one of"),
    "no number": ({**HEAD, "rules": [{"select": {"role": "rail"}}]}, "rules[0].vfs is missing"),
    "negative": (rule(vfs=-1), "rules[0].vfs must be a whole number from 0"),
    "role": (rule(select={"role": "rails"}), "rules[0].select.role must be one of rail"),
    "address": (rule(select={"address": "0c:00.0"}), "rules[0].select.address must be"),
    "vendor as a number": (rule(select={"vendor": 8086}), "rules[0].select.vendor must be 4 hexadecimal"),
    "model": (rule(select={"model": "15b3"}), "rules[0].select.model must be"),
    "mtu": (rule(mtu=10), "rules[0].mtu must be a whole number from 68 to 65535 bytes"),
    "eswitch": (rule(eswitch="vepa"), "rules[0].eswitch must be one of legacy, switchdev"),
}


def test_what_is_written_is_what_is_decoded() -> None:
    (one,) = decode_provisioning(GOOD).rules
    assert (one.select.role, one.vfs, one.mtu, one.eswitch) == ("rail", 8, 9000, "switchdev")


@pytest.mark.parametrize(("document", "said"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_meant_is_refused_by_name(document: Any, said: str) -> None:
    with pytest.raises(ProvisioningError) as refused:
        decode_provisioning(document)
    assert said in str(refused.value)


def test_the_committed_schema_is_the_codes() -> None:
    path = Path(__file__).parents[3] / "api/schema/vfprovisioning.v1alpha1.json"
    assert json.loads(path.read_text()) == json_schema(), "run python -m railmate_api.provisioning, see there"


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "vfs.yaml"
    with pytest.raises(UsageError, match=r"vfs.yaml: cannot be read .*--vf-provisioning"):
        load_provisioning(path)
    path.write_text("rules: [")
    with pytest.raises(UsageError, match=r"vfs.yaml: line 1: "):
        load_provisioning(path)
    path.write_text(json.dumps(rule(vfs=-1)))
    with pytest.raises(UsageError, match=r"vfs.yaml: rules\[0\].vfs must be"):
        load_provisioning(path)
    path.write_text(json.dumps(GOOD))
    assert load_provisioning(path) == decode_provisioning(GOOD)
