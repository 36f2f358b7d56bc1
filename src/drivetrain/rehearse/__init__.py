"""The real script at any world size, on this machine, before a device is rented."""
