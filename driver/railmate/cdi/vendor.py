"""The GPU vendors' own CDI specs, where they are on the node.

NVIDIA's container toolkit and AMD's write specs that bring libraries along with the device nodes. A
claim then points to them and railmate adds nothing for the GPU.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

import yaml

log = logging.getLogger(__name__)

#: Kinds whose devices are GPUs, named by UUID (NVIDIA, ``nvidia-ctk cdi generate``; AMD, ``amd-ctk``).
_GPU_KINDS = frozenset({"nvidia.com/gpu", "amd.com/gpu"})


def vendor_devices(directories: Iterable[Path]) -> dict[str, str]:
    """Device name (a GPU's UUID) to fully qualified CDI name, from all readable vendor specs.

    A spec that cannot be read is logged and left out: a claim then falls back to device nodes.
    """
    found: dict[str, str] = {}
    for directory in directories:
        if not directory.is_dir():
            continue
        for file in sorted(directory.iterdir()):
            if file.suffix not in {".json", ".yaml", ".yml"}:
                continue
            try:
                text = file.read_text()
                if not any(kind in text for kind in _GPU_KINDS):
                    continue
                spec = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
                kind = spec["kind"]
                if not isinstance(kind, str):
                    raise TypeError("its kind is no string")
                names = [str(device["name"]) for device in spec["devices"]]
            except FileNotFoundError:
                continue  # written and removed by its owner while we read
            except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
                log.warning(
                    "CDI spec %s: left out, cannot be read (%s); its owner should write it again", file, error
                )
                continue
            if kind in _GPU_KINDS:
                found.update({name: f"{kind}={name}" for name in names})
    return found
