"""From prompts to training rows: read, render, sample, examine, capture, order.

Rows move through typed records (`prompts.Prompt`, `responses.Response`, `dataset.Row`); what
cannot be used is counted in `rejects.Rejects` with its reason and never ends a run.
"""
