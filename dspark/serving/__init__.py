"""Batch-1 serving: queue and worker, text streaming, the OpenAI-compatible HTTP server."""
