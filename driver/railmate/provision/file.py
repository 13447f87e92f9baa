"""Reading the provisioning file."""

from __future__ import annotations

from pathlib import Path

from railmate.errors import UsageError
from railmate.strictyaml import load
from railmate_api.provisioning import ProvisioningError, VfProvisioning, decode_provisioning


def load_provisioning(path: Path) -> VfProvisioning:
    """Raises UsageError, which names the file, the cause and the next step."""
    document = load(path, "--vf-provisioning", "The fields are those of kind VfProvisioning.").document
    try:
        return decode_provisioning(document)
    except ProvisioningError as error:
        raise UsageError(f"{path}: {error}. The fields are those of kind VfProvisioning.") from None
