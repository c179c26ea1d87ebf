"""What backward needs of each layer: kept on the device, moved to the host, or remade."""
