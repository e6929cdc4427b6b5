"""Everything that depends on a serving stack: a folder per stack, and the step files of any."""
