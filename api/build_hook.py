"""Compiles the wire descriptions under ``railmate_api/proto`` while the package is built.

Runs for wheels and for editable installs alike, so a checkout works after one ``pip install -e .``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def compile_protos(api_root: Path) -> list[Path]:
    """Compile every ``.proto`` file below ``api_root`` next to itself; return the sources.

    Raises RuntimeError when protoc refuses a file (its message is on stderr by then).
    """
    import grpc_tools
    from grpc_tools import protoc

    sources = sorted(api_root.glob("railmate_api/proto/*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    for source in sources:
        arguments = [
            "protoc",
            f"-I{api_root}",
            f"-I{well_known}",
            f"--python_out={api_root}",
            f"--pyi_out={api_root}",
        ]
        if "\nservice " in source.read_text() and source.stem not in {"nri", "ttrpc"}:
            arguments.append(f"--grpc_python_out={api_root}")  # NRI's services go over ttrpc, not gRPC
        if protoc.main([*arguments, str(source)]) != 0:
            raise RuntimeError(f"{source}: protoc refused it, see the message above")
    return sources


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compile_protos(Path(self.root) / "api")
