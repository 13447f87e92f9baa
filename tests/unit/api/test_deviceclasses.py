"""The DeviceClasses that the chart installs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import railmate_api
from railmate.publish.attributes import PUBLISHED
from railmate_api import attributes as names

CLASSES = Path(railmate_api.__file__).parent / "deviceclasses.yaml"


@pytest.fixture(scope="module")
def classes() -> dict[str, Any]:
    return {item["metadata"]["name"]: item for item in yaml.safe_load_all(CLASSES.read_text())}


def test_there_is_a_class_for_each_kind(classes: dict[str, Any]) -> None:
    assert set(classes) == {
        names.CLASS_GPU,
        names.CLASS_GPU_PARTITION,
        names.CLASS_RDMA_VF,
        names.CLASS_RDMA_SHARED,
        names.CLASS_PAIR,
        names.CLASS_PAIR_NUMA,
        names.CLASS_PAIR_ANY,
        names.CLASS_GROUP,
        names.CLASS_NODE,
    }


def test_all_expressions_fit_into_the_schedulers_cache_with_room_for_users(classes: dict[str, Any]) -> None:
    """It keeps ten compiled; the chart adds one for each vendor of an extended resource."""
    expressions = {one["cel"]["expression"] for item in classes.values() for one in item["spec"]["selectors"]}
    assert len(expressions) <= 9  # all classes at once; a cluster uses few of them


def test_selectors_ask_for_the_driver_first(classes: dict[str, Any]) -> None:
    """An attribute that another driver's device lacks would end the scheduling attempt (CEL runtime error)."""
    for item in classes.values():
        (selector,) = item["spec"]["selectors"]
        assert selector["cel"]["expression"].startswith(f'device.driver == "{names.DRIVER_NAME}" &&')


def test_selectors_read_attributes_that_are_published_and_guard_each(classes: dict[str, Any]) -> None:
    for item in classes.values():
        expression = item["spec"]["selectors"][0]["cel"]["expression"]
        (kind,) = re.findall(r'kind.orValue\(""\) == "([a-z-]+)"', expression)
        read = re.findall(r"device\.attributes(.{0,40})", expression)
        assert read
        for part in read:
            found = re.match(r'\["railmate\.dev"\]\.\?([A-Za-z]+)\.(orValue|hasValue)\(', part)
            assert found, f"{item['metadata']['name']}: a device without it would end the attempt"
            assert f"{names.DOMAIN}/{found[1]}" in PUBLISHED[kind]
