"""From what somebody wants of a node to a ResourceClaimTemplate that the scheduler answers fast: pure functions."""
