"""Facts about each release of the vendor's stack, and which of them still hold in a new release."""
