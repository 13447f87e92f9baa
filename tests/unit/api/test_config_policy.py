"""The generated admission policy; what the API server makes of it is tested in tests/component/test_admission.py."""

from __future__ import annotations

from pathlib import Path

from component.config_values import KINDS
from railmate_api import admission, config, fields

ROOT = Path(__file__).resolve().parents[3]


def test_the_file_in_the_chart_is_up_to_date() -> None:
    """Else: hack/env python -m railmate_api.admission > driver/chart/files/config-admission.yaml"""
    assert (ROOT / "driver/chart/files/config-admission.yaml").read_text() == admission.text()


def test_every_field_has_a_variable_that_is_looked_at() -> None:
    for kinds in (config.KINDS, KINDS):
        variables = {one["name"]: one["expression"] for one in admission.policy_spec(kinds)["variables"]}
        for kind, of in kinds.items():
            for one in fields.settings(of).values():
                assert one.type.expected in variables[f"{kind}_{one.name}"]
                assert f"variables.{kind}_{one.name}" in variables["problems"]


def test_variables_are_declared_before_they_are_used() -> None:
    seen: list[str] = []
    for one in admission.policy_spec(KINDS)["variables"]:
        used = [part.split(".")[0] for part in one["expression"].split("variables.")[1:]]
        names = {"".join(c for c in text.split("[")[0] if c.isalnum() or c == "_") for text in used}
        assert all(any(name.startswith(known) for known in seen) for name in names)
        seen.append(one["name"])


def test_only_new_objects_and_changed_classes_are_judged() -> None:
    """A claim that is older than the policy must be able to lose its finalizer."""
    rules = admission.policy_spec()["matchConstraints"]["resourceRules"]
    operations = {what: rule["operations"] for rule in rules for what in rule["resources"]}
    assert operations == {
        "resourceclaims": ["CREATE"],
        "resourceclaimtemplates": ["CREATE"],
        "deviceclasses": ["CREATE", "UPDATE"],
    }
