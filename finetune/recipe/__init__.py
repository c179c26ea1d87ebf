"""The recipe: its schema, its reader and its rules. Imports nothing heavier than Pydantic and PyYAML."""
