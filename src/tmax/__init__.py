"""tmax synthesises terminal tasks and trains language-model agents on them."""

__version__ = "0.1.0"
