"""Measurements: acceptance and losslessness of a draft, latency of a server, and their report."""
