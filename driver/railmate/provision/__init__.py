"""Virtual functions made before they are offered: which NIC gets how many, and the making of them."""
