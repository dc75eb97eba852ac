"""dspark: sample, distill and serve a DSpark block draft. Importing this costs nothing."""

__version__ = "0.1.0"
