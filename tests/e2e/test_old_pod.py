"""A pod in the old style, by a number of GPUs, through the real kubelet: nothing of it is edited."""

from __future__ import annotations

from e2e.lab import Lab, Workspace
from e2e.test_examples import assert_holds_exactly, parent_of, right_nics


def test_an_old_pod_gets_eight_gpus_each_with_the_vf_beside_it(lab: Lab, workspace: Workspace) -> None:
    try:
        workspace.apply_example("old-pod")
        status = workspace.wait_ready("old-pod")["status"]["extendedResourceClaimStatus"]
        claim = workspace.get("resourceclaim", status["resourceClaimName"])
        devices = [one["device"] for one in claim["status"]["allocation"]["devices"]["results"]]
        pairs = [
            (lab.devices[name]["railmate.dev/gpuPciBusID"], lab.devices[name]["railmate.dev/nicPciBusID"])
            for name in devices
        ]
        assert {gpu for gpu, _ in pairs} == set(lab.machine.expected["gpus"])
        assert all(parent_of(lab, vf) in right_nics(lab)[gpu] for gpu, vf in pairs)
        assert_holds_exactly(lab, workspace, "old-pod", [gpu for gpu, _ in pairs], [vf for _, vf in pairs])
    finally:
        workspace.kubectl("delete", "deviceclass", "nvidia.com-gpu.railmate.dev", "--ignore-not-found")
