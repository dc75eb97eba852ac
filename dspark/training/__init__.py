"""Distillation of a draft: the loop, its checkpoints, its figures, and how it is launched.

`program.main` is the program, `program.run` the function behind it.
"""
