"""Distillation of a draft: the loop, its checkpoints, its figures, and how it is launched.

`trainer.main` is the program, `trainer.run` the function behind it.
"""
