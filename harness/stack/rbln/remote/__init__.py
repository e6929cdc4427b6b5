"""A server on another host, over the ssh client alone."""
