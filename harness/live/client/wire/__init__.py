"""The epoll client: a compiled loop that sends, stamps and goes on, and an interpreter that reads answers beside it."""
