"""The GPU vendors' own CDI specs, where they are on the node.

NVIDIA's container toolkit and AMD's write specs that bring libraries along with the device nodes. A
claim then points to them and railmate adds nothing for the GPU.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

log = logging.getLogger(__name__)

#: libyaml's, where the package was built with it: ten times as fast. Both load plain data only.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: Kinds whose devices are GPUs, named by UUID (NVIDIA, ``nvidia-ctk cdi generate``; AMD, ``amd-ctk``).
_GPU_KINDS = frozenset({"nvidia.com/gpu", "amd.com/gpu"})


class VendorSpecs:
    """The specs in some directories; each file is parsed once for each of its versions.

    NVIDIA's is some ten kilobytes of YAML, and its toolkit may write it long after the driver has started.
    """

    def __init__(self, directories: Iterable[Path]) -> None:
        self._directories = tuple(directories)
        self._lock = threading.Lock()
        self._parsed: dict[Path, tuple[tuple[int, ...], dict[str, str]]] = {}

    def devices(self) -> dict[str, str]:
        """Device name (a GPU's UUID) to fully qualified CDI name, from all readable vendor specs.

        A spec that cannot be read is logged and left out: a claim then falls back to device nodes.
        """
        with self._lock:
            seen: dict[Path, tuple[tuple[int, ...], dict[str, str]]] = {}
            for file in self._files():
                try:
                    status = file.stat()
                except OSError:
                    continue  # removed by its owner while we look
                version = (status.st_mtime_ns, status.st_ino, status.st_size)
                known = self._parsed.get(file)
                seen[file] = known if known and known[0] == version else (version, _parse(file))
            self._parsed = seen
            return {name: cdi_id for _, devices in seen.values() for name, cdi_id in devices.items()}

    def _files(self) -> list[Path]:
        found = []
        for directory in self._directories:
            if directory.is_dir():
                found += [
                    path for path in sorted(directory.iterdir()) if path.suffix in {".json", ".yaml", ".yml"}
                ]
        return found


def _parse(file: Path) -> dict[str, str]:
    try:
        text = file.read_text()
        if not any(kind in text for kind in _GPU_KINDS):
            return {}
        spec = json.loads(text) if file.suffix == ".json" else yaml.load(text, Loader=_LOADER)
        kind = spec["kind"]
        if not isinstance(kind, str):
            raise TypeError("its kind is no string")
        names = [str(device["name"]) for device in spec["devices"]]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        log.warning(
            "CDI spec %s: left out, cannot be read (%s); its owner should write it again", file, error
        )
        return {}
    return {name: f"{kind}={name}" for name in names} if kind in _GPU_KINDS else {}
