"""Ways to show a topology: document (JSON), table, tree and picture. Pure functions that return text or data."""
