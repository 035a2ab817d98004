"""The daemon: sockets, tenants, devices."""
