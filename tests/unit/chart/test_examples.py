"""The examples: manifests that ask for what their pages say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from railmate_api import attributes as names
from railmate_api import config

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
#: gangs, scheduler settings and pods without a claim of their own are tested in tests/component
FOLDERS = sorted(
    path.name
    for path in EXAMPLES.iterdir()
    if path.is_dir() and not path.name.startswith(("gang-", "old-pod", "scheduler", "shared-pf"))
)


def load(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The claim template and the pod of an example."""
    template, pod = yaml.safe_load_all((EXAMPLES / folder / "manifest.yaml").read_text())
    assert (template["kind"], pod["kind"]) == ("ResourceClaimTemplate", "Pod")
    return template, pod


def test_the_examples_are_there() -> None:
    assert {"eight-pairs", "host-network", "matched-gpu-and-vf", "one-pair", "vfio-pci"} <= set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_pod_uses_the_claim_and_ends_promptly(folder: str) -> None:
    template, pod = load(folder)
    (claim,) = pod["spec"]["resourceClaims"]
    (container,) = pod["spec"]["containers"]
    assert (
        claim["resourceClaimTemplateName"]
        == template["metadata"]["name"]
        == folder
        == pod["metadata"]["name"]
    )
    assert container["resources"]["claims"] == [{"name": claim["name"]}]
    assert container["imagePullPolicy"] == "IfNotPresent"
    assert "trap 'exit 0' TERM" in container["command"][-1]
    assert pod["spec"]["terminationGracePeriodSeconds"] <= 5


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_page_shows_how_to_run_and_end_it(folder: str) -> None:
    page = (EXAMPLES / folder / "README.md").read_text()
    assert f"kubectl apply -f examples/{folder}/manifest.yaml" in page
    assert "kubectl delete -f" in page
    assert f"pod/{folder}" in page


@pytest.mark.parametrize(
    ("folder", "classes", "count"),
    [
        ("one-pair", [names.CLASS_PAIR], 1),
        ("host-network", [names.CLASS_PAIR], 1),
        ("matched-gpu-and-vf", [names.CLASS_GPU, names.CLASS_RDMA_VF], 1),
        ("eight-pairs", [names.CLASS_PAIR], 8),
        ("vfio-pci", [names.CLASS_RDMA_VF], 1),
    ],
)
def test_requests_name_our_classes(folder: str, classes: list[str], count: int) -> None:
    template, _ = load(folder)
    requests = [request["exactly"] for request in template["spec"]["spec"]["devices"]["requests"]]
    assert [request["deviceClassName"] for request in requests] == classes
    assert all(request.get("count", 1) == count for request in requests)


def test_gpu_and_vf_are_joined_by_their_switch() -> None:
    devices = load("matched-gpu-and-vf")[0]["spec"]["spec"]["devices"]
    assert devices["constraints"] == [{"requests": ["gpu", "vf"], "matchAttribute": names.PCIE_SWITCH}]


def test_the_config_in_an_example_is_one_the_driver_reads() -> None:
    (entry,) = load("matched-gpu-and-vf")[0]["spec"]["spec"]["devices"]["config"]
    assert entry["opaque"]["driver"] == names.DRIVER_NAME
    assert config.decode(entry["opaque"]["parameters"]).interface_name == "net1"


def test_pod_on_the_host_network_asks_for_hints_which_nic_is_its_own() -> None:
    template, pod = load("host-network")
    (entry,) = template["spec"]["spec"]["devices"]["config"]
    assert config.decode(entry["opaque"]["parameters"]).env_hints is True
    assert pod["spec"]["hostNetwork"] is True


def test_a_program_is_told_the_address_of_the_vf_that_it_drives() -> None:
    """The config itself is applied in the virtual node (tests/e2e/vnode/test_vfio.py)."""
    template, _ = load("vfio-pci")
    devices = template["spec"]["spec"]["devices"]
    decoded = config.decode(devices["config"][0]["opaque"]["parameters"])
    assert (decoded.driver, decoded.env_hints) == ("vfio-pci", True)
    manifest = (EXAMPLES / "vfio-pci/manifest.yaml").read_text()
    variable = f"PCIDEVICE_RAILMATE_DEV_{devices['requests'][0]['name'].upper()}"
    assert variable in manifest
    assert variable in (EXAMPLES / "vfio-pci/README.md").read_text()


def test_two_pods_each_have_a_share_and_addresses_that_the_node_gives() -> None:
    template, *pods = yaml.safe_load_all((EXAMPLES / "shared-pf" / "manifest.yaml").read_text())
    devices = template["spec"]["spec"]["devices"]
    assert [one["exactly"]["deviceClassName"] for one in devices["requests"]] == [names.CLASS_RDMA_SHARED]
    (entry,) = devices["config"]
    said = config.decode(entry["opaque"]["parameters"])
    assert isinstance(said, config.RdmaSharedConfig)
    assert said.ipam is not None
    assert said.ipam["type"] == "host-local"
    for pod in pods:
        (claim,) = pod["spec"]["resourceClaims"]
        assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
        assert pod["spec"]["containers"][0]["resources"]["claims"] == [{"name": claim["name"]}]
    page = (EXAMPLES / "shared-pf" / "README.md").read_text()
    assert all(f"pod/{pod['metadata']['name']}" in page for pod in pods)
    assert "sharedPFs" in page
