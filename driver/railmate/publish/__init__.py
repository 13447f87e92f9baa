"""From inventory and topology to ResourceSlices: the mapping is pure, the controller keeps the API right."""
