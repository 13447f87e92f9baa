"""The API server, as far as the node plugin talks to it: plain JSON objects over one client."""
