"""The exported JSON schema says what the decoder says, in the eyes of Helm's validator."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from component.config_values import KINDS, parameter_lists
from harness.gobuild import program
from railmate_api import config, schema
from railmate_api.attributes import CONFIG_API_VERSION

ROOT = Path(__file__).resolve().parents[3]
HEAD = {"apiVersion": CONFIG_API_VERSION, "kind": "EveryType"}


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chart whose values are lists of configs: Helm checks JSON schemas with a library that is not ours."""
    directory = tmp_path_factory.mktemp("chart")
    (directory / "Chart.yaml").write_text("apiVersion: v2\nname: schema\nversion: 1.0.0\n")
    whole = schema.schema(KINDS)
    one = {"oneOf": whole.pop("oneOf")}
    lists = {"type": "object", "properties": {"configs": {"type": "array", "items": one}}}
    (directory / "values.schema.json").write_text(json.dumps(whole | lists))
    return directory


def refused(chart: Path, *configs: Any) -> str:
    """What Helm says about the configs; "" when they fit the schema."""
    values = chart / "given.json"
    values.write_text(json.dumps({"configs": configs}))
    command: list[Any] = [program("helm"), "template", "x", chart, "-f", values]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def test_schema_takes_every_config_that_the_decoder_takes(chart: Path) -> None:
    good: list[dict[str, Any]] = []

    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(parameter_lists())
    def collect(parameters: list[dict[str, Any]]) -> None:
        good.extend(one for one in parameters if not config.problems(one, KINDS))

    collect()
    assert len(good) > 20
    assert refused(chart, *good) == ""


def test_schema_refuses_what_the_decoder_refuses(chart: Path) -> None:
    bad: list[dict[str, Any]] = [
        HEAD | {"apiVersion": "railmate.dev/v1"},
        HEAD | {"kind": "Other"},
        {"kind": "EveryType"},
        HEAD | {"unknown": 1},
        HEAD | {"name": "a/b"},
        HEAD | {"name": "lo"},
        HEAD | {"name": "abcdefghijklmnop"},
        HEAD | {"name": None},
        HEAD | {"mtu": 67},
        HEAD | {"mtu": "9000"},
        HEAD | {"trust": 1},
        HEAD | {"link": "up"},
        HEAD | {"addresses": ["10.0.0.1"]},
        HEAD | {"addresses": ["10.0.0.1/8"] * 65},
        HEAD | {"routes": [{}]},
        HEAD | {"routes": [{"to": "10.0.0.0/8", "gw": ""}]},
        HEAD | {"matrix": [[10]]},
        HEAD | {"ipam": {"type": "dhcp"}},
        HEAD | {"plugin": {"anything": 1}},
        HEAD | {"offset": 1},
        HEAD | {"selectors": [{}]},
        HEAD | {"features": {"A": True}},
        HEAD | {"features": {"a": 1}},
        HEAD | {"features": {f"a{n}": True for n in range(7)}},
    ]
    assert all(config.problems(one, KINDS) for one in bad)
    said = refused(chart, HEAD, *bad)
    assert [
        i for i in range(1, len(bad) + 1) if f"/configs/{i}'" not in said and f"/configs/{i}/" not in said
    ] == []
    assert "/configs/0'" not in said
