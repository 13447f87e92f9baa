"""Every form of railmate claim is one that the scheduler's allocator answers fast, also where the answer is no."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import railmate_api
from component.allocator_cases import Case as Question
from component.test_claim_forms import EXTRA_CLASS, FORMS, MACHINES, run
from component.test_explain_allocator import Asked
from railmate.publish.slices import resource_slices
from railmate_api import attributes as names
from unit.publish.offered_machines import Case, big, built

CLASSES = Path(railmate_api.__file__).parent / "deviceclasses.yaml"
#: Half of what the scheduler gives a node. Most answers take milliseconds; 16 pairs where 15 are free half a second.
SECONDS = 5
SIXTEEN = built("sixteen", big(switches=8, gpus=2, nics=2), {}, vfs=2)
FLAGS = [form.flags for form in FORMS.values()]
FLAGS += [
    "--pairs 16",
    "--pairs 16 --whole-node",
    "--pairs 16 --rail-aligned",
    "--pairs 16 --fallback numa,any",
]


@cache
def classes() -> dict[str, Any]:
    shipped = [*yaml.safe_load_all(CLASSES.read_text()), EXTRA_CLASS]
    return {item["metadata"]["name"]: item for item in shipped}


@cache
def composed(flags: str) -> dict[str, Any]:
    code, text = run("claim", *flags.split(), "-o", "json")
    assert code == 0
    (template,) = json.loads(text)["items"]
    spec: dict[str, Any] = template["spec"]["spec"]
    return spec


def question(case: Case, spec: dict[str, Any], taken: int) -> Question:
    """``taken``: how many pairs, or else GPUs, others have of the node, the first ones."""
    kinds = (names.KIND_PAIR, names.KIND_GROUP, names.KIND_GPU)
    kind = next((kind for kind in kinds if any(one.kind == kind for one in case.offer.devices)), "")
    held = [one.name for one in case.offer.devices if one.kind == kind][:taken]
    others = [
        {
            "metadata": {"name": f"held-{number}", "namespace": "default"},
            "spec": {},
            "status": {
                "allocation": {
                    "devices": {
                        "results": [
                            {"request": "r", "driver": names.DRIVER_NAME, "pool": "n1", "device": device}
                        ]
                    }
                }
            },
        }
        for number, device in enumerate(held)
    ]
    return {
        "node": {"metadata": {"name": "n1"}},
        "slices": resource_slices(case.offer, names.DRIVER_NAME, "n1"),
        "classes": classes(),
        "claims": [{"metadata": {"name": "wanted", "namespace": "default"}, "spec": spec}],
        "others": others,
    }


@pytest.mark.parametrize("case", [*MACHINES, SIXTEEN], ids=lambda case: str(case.name))
def test_no_form_takes_the_allocator_long(case: Case, tmp_path: Path) -> None:
    asked = [(flags, taken) for flags in FLAGS for taken in (0, 1, 3)]
    questions = [question(case, composed(flags), taken) for flags, taken in asked]
    began = time.monotonic()
    answers = Asked(questions, tmp_path, SECONDS).answers()
    print(f"{case.name}: {len(asked)} answers in {1000 * (time.monotonic() - began):.0f} ms")
    slow = [ask for ask, answer in zip(asked, answers, strict=True) if answer["verdict"] == "timeout"]
    assert not slow
    assert "error" not in {answer["verdict"] for answer in answers}
    assert "none" in {answer["verdict"] for answer in answers}


def test_a_constraint_for_each_pair_would_take_it_long(tmp_path: Path) -> None:
    """The form that railmate claim never writes: the test above can fail."""
    requests, constraints = [], []
    for number in range(8):
        pair = [f"gpu-{number}", f"vf-{number}"]
        for name, device_class in zip(pair, (names.CLASS_GPU, names.CLASS_RDMA_VF), strict=True):
            requests.append({"name": name, "exactly": {"deviceClassName": device_class, "count": 1}})
        constraints.append({"requests": pair, "matchAttribute": names.PCIE_SWITCH})
    spec = {"devices": {"requests": requests, "constraints": constraints}}
    case = next(case for case in MACHINES if case.name == "dgx-a100-4vf")
    (answer,) = Asked([question(case, spec, 1)], tmp_path, 1).answers()
    assert answer["verdict"] == "timeout"
