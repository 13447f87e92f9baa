"""What users write and what goes over a wire: names, config types, wire descriptions."""
