"""Cost models fitted to sealed runs, and how far runs scatter about them."""
