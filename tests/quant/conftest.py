"""What computes here needs the frameworks set up first."""

from support import frameworks  # noqa: F401
