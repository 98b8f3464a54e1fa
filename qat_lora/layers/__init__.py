"""The modules that a student is made of, and how a whole model is converted to them and back."""
