"""The DeviceClasses that the chart installs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import railmate_api
from railmate_api import attributes as names

CLASSES = Path(railmate_api.__file__).parent / "deviceclasses.yaml"


@pytest.fixture(scope="module")
def classes() -> dict[str, Any]:
    return {item["metadata"]["name"]: item for item in yaml.safe_load_all(CLASSES.read_text())}


def test_there_is_a_class_for_each_kind(classes: dict[str, Any]) -> None:
    assert set(classes) == {names.CLASS_GPU, names.CLASS_RDMA_VF, names.CLASS_PAIR}


def test_selectors_ask_for_the_driver_first(classes: dict[str, Any]) -> None:
    """An attribute that another driver's device lacks would end the scheduling attempt (CEL runtime error)."""
    for item in classes.values():
        (selector,) = item["spec"]["selectors"]
        assert selector["cel"]["expression"].startswith(f'device.driver == "{names.DRIVER_NAME}" &&')


def test_selectors_read_attributes_that_are_published(classes: dict[str, Any]) -> None:
    for item in classes.values():
        expression = item["spec"]["selectors"][0]["cel"]["expression"]
        for part in expression.split('device.attributes["railmate.dev"].?')[1:]:
            name = part.split(".")[0].split("(")[0]
            assert f"{names.DOMAIN}/{name}" in vars(names).values()
