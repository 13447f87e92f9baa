"""The pods of a soak: what they ask for, and how they look for it themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MISSING = 77  # exit code by which a container says that its devices are not there
_PAIR, _GPU, _VF = (f"{kind}.railmate.dev" for kind in ("gpu-rdma-pair", "gpu", "rdma-vf"))


@dataclass(frozen=True)
class Kind:
    """What a pod asks for, how many GPUs that takes and how many netdevs it finds inside."""

    name: str
    spec: dict[str, Any]
    gpus: int
    netdevs: int
    weight: int


def _requests(**classes: tuple[str, int]) -> list[dict[str, Any]]:
    return [
        {"name": name, "exactly": {"deviceClassName": device_class, "count": count}}
        for name, (device_class, count) in classes.items()
    ]


_MATCHED = {"requests": ["gpu", "vf"], "matchAttribute": "railmate.dev/pcieSwitch"}
KINDS = (
    Kind("one-pair", {"devices": {"requests": _requests(pair=(_PAIR, 1))}}, 1, 1, 8),
    Kind("two-pairs", {"devices": {"requests": _requests(pairs=(_PAIR, 2))}}, 2, 2, 4),
    Kind(
        "matched",
        {"devices": {"requests": _requests(gpu=(_GPU, 1), vf=(_VF, 1)), "constraints": [_MATCHED]}},
        1, 1, 4,
    ),
    Kind("gpu", {"devices": {"requests": _requests(gpu=(_GPU, 1))}}, 1, 0, 3),
    Kind("vf", {"devices": {"requests": _requests(vf=(_VF, 1))}}, 0, 1, 2),
    Kind("eight-pairs", {"devices": {"requests": _requests(pairs=(_PAIR, 8))}}, 8, 8, 1),
)  # fmt: skip


def pod_of(kind: Kind, name: str) -> dict[str, Any]:
    """A pod that ends with MISSING when it has not got exactly what it asked for."""
    look = (
        f'[ "$(ls -d /sys/class/net/net* 2>/dev/null | wc -l)" = {kind.netdevs} ] && '
        f'[ "$(ls -d /dev/nvidia[0-9]* 2>/dev/null | wc -l)" = {kind.gpus} ] || exit {MISSING}'
    )
    container = {
        "name": "main",
        "image": "busybox:stable",
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", f"{look}; trap 'exit 0' TERM; sleep 2147483647 & wait"],
        "resources": {"claims": [{"name": "devices"}]},
    }
    spec = {
        "terminationGracePeriodSeconds": 2,
        "containers": [container],
        "resourceClaims": [{"name": "devices", "resourceClaimTemplateName": kind.name}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
