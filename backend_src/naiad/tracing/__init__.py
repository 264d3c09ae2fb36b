"""Spans of requests in OpenTelemetry's form, and the thread that sends them to a collector."""
