"""Presentation: the report, the terminal tables, and files for other tools. Nothing is measured or judged here."""
