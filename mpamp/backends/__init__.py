"""One backend per device type."""
