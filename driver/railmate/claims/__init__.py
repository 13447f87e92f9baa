"""From an allocated claim to prepared devices in a pod: the plan, the ledger of what was done, the verbs."""
