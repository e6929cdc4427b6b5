"""What belongs to a vendor's serving stack: a folder each."""
