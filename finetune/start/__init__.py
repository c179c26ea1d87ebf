"""How a user begins: the shipped recipes, a recipe of one's own, the schema for editors. Loads no torch."""
