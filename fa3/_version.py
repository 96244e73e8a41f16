"""The one place that holds the version; the build reads it, `fa3.__version__` shows it."""

__version__ = "0.1.0"
