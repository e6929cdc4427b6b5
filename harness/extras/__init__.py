"""What few users need, each a plug-in in a folder of its own. Nothing in the core imports it."""
