"""How good a student is: scores on held-out text, and the report that shows them."""
