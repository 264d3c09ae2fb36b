"""Naiad behind proxies, routers and orchestrators; docs/deployment.md explains it."""
