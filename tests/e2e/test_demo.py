"""hack/demo's last part, on the cluster that the tests have: its first is what the fixtures do."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from e2e.lab import Lab
from harness.demo import run_example, show
from harness.deploy import EXAMPLES


@pytest.fixture
def example(lab: Lab) -> Iterator[None]:
    run_example(lab.cluster)
    yield
    lab.cluster.kubectl("delete", "-f", str(EXAMPLES / "one-pair" / "manifest.yaml"))
    lab.wait_home()


@pytest.mark.usefixtures("example")
def test_it_shows_the_allocation_and_what_the_pod_sees_of_it(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    show(lab.cluster)
    _, allocated, interfaces, nodes, metadata, commands = capsys.readouterr().out.split("\n── ")
    (result,) = json.loads(allocated.partition("\n")[2])
    assert result["driver"] == "railmate.dev"
    assert "net1" in interfaces
    assert "/dev/nvidia" in nodes
    assert "/dev/infiniband" in nodes
    assert result["device"] in metadata
    for line in commands.splitlines():
        program, _, rest = line.partition(" ")
        if rest.startswith("kubectl get") or rest.startswith("kubectl describe"):
            assert program == "hack/cluster"
            assert lab.cluster.kubectl(*rest.removeprefix("kubectl ").split())
