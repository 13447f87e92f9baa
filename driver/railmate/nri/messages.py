"""Between NRI's protobuf messages and the plain types of :mod:`railmate.nri.events`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from railmate.nri.events import ContainerAdjustment, ContainerInfo, PodSandbox, Rlimit
from railmate_api.proto import nri_pb2


def pod_sandbox(message: Any) -> PodSandbox:
    """A PodSandbox from its message. A pod on the host network has no network namespace path."""
    netns = next((ns.path for ns in message.linux.namespaces if ns.type == "network"), "")
    return PodSandbox(
        id=message.id,
        name=message.name,
        namespace=message.namespace,
        uid=message.uid,
        netns_path=Path(netns) if netns else None,
        pid=message.pid,
        annotations=dict(message.annotations),
    )


def container_info(message: Any) -> ContainerInfo:
    """A ContainerInfo from a Container message."""
    return ContainerInfo(
        id=message.id,
        name=message.name,
        pod_sandbox_id=message.pod_sandbox_id,
        cdi_devices=tuple(device.name for device in message.CDI_devices),
        env=_environment(message.env),
        rlimits=tuple(Rlimit(limit.type, limit.soft, limit.hard) for limit in message.rlimits),
        annotations=dict(message.annotations),
        pid=message.pid,
        hooks=tuple(tuple(hook.args) for hook in message.hooks.create_runtime),
    )


def _environment(lines: Iterable[str]) -> dict[str, str]:
    """The last of equal names counts, as for the runtime."""
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def create_container_response(adjustment: ContainerAdjustment | None) -> Any:
    """The answer to CreateContainer; an empty one for None."""
    response = nri_pb2.CreateContainerResponse()
    if adjustment is not None:
        for limit in adjustment.rlimits:
            response.adjust.rlimits.add(type=limit.type, soft=limit.soft, hard=limit.hard)
        for key, value in adjustment.env.items():
            response.adjust.env.add(key=key, value=value)
        for name in adjustment.cdi_devices:
            response.adjust.CDI_devices.add(name=name)
        response.adjust.annotations.update(adjustment.annotations)
    return response
