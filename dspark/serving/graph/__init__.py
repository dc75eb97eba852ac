"""Decode with one captured graph a step: a Ling-3.0 target, and a draft if there is one."""
