"""Wire descriptions (``*.proto``) and the modules compiled from them while the package is built."""
