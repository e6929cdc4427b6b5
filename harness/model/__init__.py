"""What is asked for, its inputs, and what a server would do with them: no server and no socket."""
