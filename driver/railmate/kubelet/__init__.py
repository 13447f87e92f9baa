"""The kubelet's side: registration and the DRA plugin service, over unix sockets."""
