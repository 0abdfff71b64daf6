"""What computes here needs the frameworks set up first."""

import frameworks  # noqa: F401
