"""CDI: specs written for the container runtime, and the vendors' own specs read.

Specification: github.com/cncf-tags/container-device-interface SPEC.md (version 1.1.0 at the time).
"""
