"""The ``railmate`` command: one sub-command a file."""
