"""Config that users write into claims, templates and DeviceClasses (opaque parameters).

``apiVersion: railmate.dev/v1alpha1``, decoded strictly: an unknown kind, an unknown field or a value
of the wrong type is an error that names the field. Class config comes first, claim config wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from railmate_api.attributes import CONFIG_API_VERSION, CONFIG_KIND_RDMA_VF

#: Kernel include/uapi/linux/if.h: IFNAMSIZ is 16 with the closing NUL.
_INTERFACE_NAME_MAX = 15
#: dev_valid_name() refuses "/", ":", white space, "." and ".."; the rest here is a narrower, safe set.
_INTERFACE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class ConfigError(ValueError):
    """The config cannot be used; the message names the field and says what is allowed."""


@dataclass(frozen=True, slots=True)
class RdmaVfConfig:
    """How a VF appears in the pod. Applies to ``rdma-vf`` devices and to the NIC half of pairs.

    ``interface_name`` (``interfaceName``): the netdev's name in the pod, 1-15 characters; unset:
    ``net1``, ``net2``, … in the order of the claim's requests. With several VFs in one request the
    name gets the VF's ordinal within the request appended from the second one on: ``rail``, ``rail1``.
    """

    interface_name: str | None = None

    def merged_over(self, base: RdmaVfConfig) -> RdmaVfConfig:
        """This config where it says something, ``base`` where it does not."""
        return RdmaVfConfig(interface_name=self.interface_name or base.interface_name)


_FIELDS = {"interfaceName": "interface_name"}


def decode(parameters: Mapping[str, Any]) -> RdmaVfConfig:
    """Decode one opaque ``parameters`` object.

    Raises ConfigError for anything that is not exactly a known kind with known fields.
    """
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"parameters must be an object, not {type(parameters).__name__}")
    version, kind = parameters.get("apiVersion"), parameters.get("kind")
    if version != CONFIG_API_VERSION:
        raise ConfigError(f"apiVersion is {version!r}, this driver reads {CONFIG_API_VERSION!r}")
    if kind != CONFIG_KIND_RDMA_VF:
        raise ConfigError(f"kind is {kind!r}, this driver reads {CONFIG_KIND_RDMA_VF!r}")
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in {"apiVersion", "kind"}:
            continue
        if name not in _FIELDS:
            known = ", ".join(sorted(_FIELDS))
            raise ConfigError(f"unknown field {name!r} in {kind}; it has: {known}")
        values[_FIELDS[name]] = value
    config = RdmaVfConfig(**values)
    _check_interface_name(config.interface_name)
    return config


def merge(configs: Sequence[RdmaVfConfig]) -> RdmaVfConfig:
    """One config from several, given in the order of ``status.allocation.devices.config``."""
    merged = RdmaVfConfig()
    for config in configs:
        merged = config.merged_over(merged)
    return merged


def _check_interface_name(name: object) -> None:
    if name is None:
        return
    if not isinstance(name, str):
        raise ConfigError(f"interfaceName must be a string, not {type(name).__name__}")
    if len(name) > _INTERFACE_NAME_MAX or not _INTERFACE_NAME.fullmatch(name):
        raise ConfigError(
            f"interfaceName {name!r} is no interface name: 1 to {_INTERFACE_NAME_MAX} letters, digits, '_', '-', '.'"
        )
    if name in {"lo", "eth0"}:
        raise ConfigError(f"interfaceName {name!r} is taken in every pod; choose another")
