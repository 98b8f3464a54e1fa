"""Scores of students and their teacher on held-out text, and the report card."""
