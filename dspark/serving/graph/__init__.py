"""Decode with one captured graph a step: a Ling-3.0 or dense target, and a draft if any."""
